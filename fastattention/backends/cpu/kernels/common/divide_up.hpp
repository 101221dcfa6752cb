// Integer division that rounds up.
#pragma once

#include <cstdint>

namespace fastattention {

inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace fastattention

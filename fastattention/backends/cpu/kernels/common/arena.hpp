// Working memory that is kept between calls, because fresh pages cost more than the arithmetic that fills them.
#pragma once

#include <cstddef>

namespace fastattention {

// Memory for one call. It takes the kept buffer if no other call holds it, and returns it when destroyed.
class Arena {
public:
    explicit Arena(size_t bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Null if there is not enough memory. Aligned to 64 bytes.
    char* data() const { return data_; }

private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace fastattention

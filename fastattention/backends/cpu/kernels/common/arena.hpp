// Working memory that is kept between calls: fresh pages cost more than the arithmetic that fills them.
#pragma once

#include <cstddef>

namespace fastattention {

// Memory for one call. Takes the kept buffer when no other call holds it, and gives it back when destroyed.
class Arena {
public:
    explicit Arena(size_t bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Null when there is not enough memory. Aligned to 64 bytes.
    char* data() const { return data_; }

private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace fastattention

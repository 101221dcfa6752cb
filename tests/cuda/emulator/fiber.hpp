// Fibers: functions that run on stacks of their own and hand the processor to each other.
#pragma once

#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emulator {

// A stack with a function that has stopped. A fiber that was never prepared has the stack of the code that switches from it.
class Fiber {
public:
    // The next switch to this fiber starts `function`, which must not return, on the stack that ends at `top`.
    void prepare(void (*function)(), char* top, std::size_t bytes);

    // Stops `from` here and continues where `to` stopped. Returns when another fiber switches to `from` again.
    static void switch_stacks(Fiber& from, Fiber& to);

private:
#if defined(__x86_64__) || defined(__aarch64__)
    void* stack_pointer_ = nullptr;
#else
    ucontext_t context_;
#endif
};

// Memory for the stacks of many fibers. The page below each is never accessible: running out of stack ends the program.
class Stacks {
public:
    static constexpr std::size_t kBytes = 64 * 1024;

    explicit Stacks(int count);
    ~Stacks();
    Stacks(const Stacks&) = delete;
    Stacks& operator=(const Stacks&) = delete;

    // The top of stack `index`; stacks grow towards lower addresses.
    char* top(int index) const;

private:
    char* memory_;
    std::size_t bytes_;
};

}  // namespace emulator

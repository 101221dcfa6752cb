#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

// Saves callee-saved registers on the stack and the stack pointer in the fiber, like setcontext without its system call. The
// indirect jump is predicted better than a return to another stack would be.
#if defined(__x86_64__)
asm(R"(
    .text
    .p2align 4
    .globl fastattention_switch_stacks
    .hidden fastattention_switch_stacks
    .type fastattention_switch_stacks, @function
fastattention_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size fastattention_switch_stacks, .-fastattention_switch_stacks
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .p2align 4
    .globl fastattention_switch_stacks
    .hidden fastattention_switch_stacks
    .type fastattention_switch_stacks, %function
fastattention_switch_stacks:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    ldr x9, [x1]
    mov sp, x9
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    br x30
    .size fastattention_switch_stacks, .-fastattention_switch_stacks
)");
#endif

namespace emulator {

#if defined(__x86_64__) || defined(__aarch64__)

extern "C" __attribute__((visibility("hidden"))) void fastattention_switch_stacks(void** from, void** to);

void Fiber::prepare(void (*function)(), char* top, std::size_t) {
#if defined(__x86_64__)
    constexpr int kWords = 8, kEntry = 6;  // six registers, the address to jump to, and an unused return address
#else
    constexpr int kWords = 20, kEntry = 11;  // x19 ... x28, x29, x30; d8 ... d15
#endif
    auto* words = reinterpret_cast<std::uintptr_t*>(top) - kWords;
    for (int i = 0; i < kWords; ++i) words[i] = 0;
    words[kEntry] = reinterpret_cast<std::uintptr_t>(function);
    stack_pointer_ = words;
}

void Fiber::switch_stacks(Fiber& from, Fiber& to) { fastattention_switch_stacks(&from.stack_pointer_, &to.stack_pointer_); }

#else

void Fiber::prepare(void (*function)(), char* top, std::size_t bytes) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = top - bytes;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, function, 0);
}

void Fiber::switch_stacks(Fiber& from, Fiber& to) { swapcontext(&from.context_, &to.context_); }

#endif

namespace {

constexpr std::size_t kPage = 64 * 1024;  // at least the page size of every system
constexpr std::size_t kStride = Stacks::kBytes + 2 * kPage;

}  // namespace

Stacks::Stacks(int count) : bytes_(count * kStride) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(memory);
    for (int i = 0; i < count; ++i) mprotect(memory_ + i * kStride, kPage, PROT_NONE);
}

Stacks::~Stacks() { munmap(memory_, bytes_); }

// Stacks are shifted against each other: at equal distances from their pages they would compete for the same cache lines.
char* Stacks::top(int index) const { return memory_ + index * kStride + kPage + kBytes + index % 64 * 576; }

}  // namespace emulator

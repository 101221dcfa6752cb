#include "common/isa.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#ifdef FA_BUILD_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Weak, so that a build may omit some (FASTATTENTION_ISAS): their addresses are then null.
#define FA_DECLARE_ISA(name)                                           \
    namespace name {                                                   \
    extern const fastattention::Kernels kernels __attribute__((weak)); \
    }
FA_DECLARE_ISA(generic)
FA_DECLARE_ISA(avx2)
FA_DECLARE_ISA(avx512)
FA_DECLARE_ISA(avx512_bf16)
FA_DECLARE_ISA(amx_bf16)

namespace fastattention {
namespace {

#ifdef FA_BUILD_X86
// Bits of CPUID leaf 7 that __builtin_cpu_supports of older compilers does not know.
bool leaf7_bit(unsigned subleaf, int reg, int bit) {
    unsigned regs[4] = {};
    if (!__get_cpuid_count(7, subleaf, &regs[0], &regs[1], &regs[2], &regs[3])) return false;
    return regs[reg] >> bit & 1;
}

// Linux denies AMX's large registers to a process until it asks for them.
bool may_use_amx() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// The instruction sets that the processor has, whether they were built or not, from the slowest to the fastest.
std::vector<const Kernels*> supported() {
    std::vector<const Kernels*> found{&generic::kernels};
#ifdef FA_BUILD_X86
    __builtin_cpu_init();
    constexpr int kEax = 0, kEdx = 3;
    // __builtin_cpu_supports also asks whether the operating system saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    unsigned regs[4] = {};
    const bool f16c = __get_cpuid(1, &regs[0], &regs[1], &regs[2], &regs[3]) && (regs[2] >> 29 & 1);
    if (!avx2 || !f16c) return found;
    found.push_back(&avx2::kernels);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return found;
    found.push_back(&avx512::kernels);
    if (!leaf7_bit(1, kEax, 5) || !__builtin_cpu_supports("avx512vnni")) return found;
    found.push_back(&avx512_bf16::kernels);
    // On Intel's processors a product of pairs takes twice as long as a multiply-add, and weights are rounded for nothing.
    if (__builtin_cpu_is("intel")) std::swap(found.back(), found[found.size() - 2]);
    const bool amx = leaf7_bit(0, kEdx, 22) && leaf7_bit(0, kEdx, 24) && leaf7_bit(0, kEdx, 25);  // bfloat16, tiles, int8
    if (amx && may_use_amx()) found.push_back(&amx_bf16::kernels);
#endif
    return found;
}

const std::vector<const Kernels*>& isas() {
    static const std::vector<const Kernels*> found = [] {
        std::vector<const Kernels*> built = supported();
        built.erase(std::remove(built.begin(), built.end(), nullptr), built.end());
        return built;
    }();
    return found;
}

}  // namespace

int num_isas() { return static_cast<int>(isas().size()); }
const Kernels& isa_kernels(int index) { return *isas()[index]; }

bool has_int8_dot(Int8Dot dot) {
#ifdef FA_BUILD_X86
    constexpr int kEax = 0;
    if (dot == Int8Dot::kAvxVnni) return leaf7_bit(1, kEax, 4);
    if (dot == Int8Dot::kAvx512Vnni) return __builtin_cpu_supports("avx512vnni");
#endif
    return dot == Int8Dot::kAmx;  // kernels for AMX are listed only if AMX has int8
}

}  // namespace fastattention

#include "common/isa.hpp"

#include <cstring>
#include <utility>
#include <vector>

#ifdef FA_BUILD_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

// FA_ISAS lists the instruction sets of this build, e.g. FA_ISA(generic) FA_ISA(avx2).
#define FA_ISA(name)                             \
    namespace name {                             \
    extern const fastattention::Kernels kernels; \
    }
FA_ISAS
#undef FA_ISA

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

#ifdef __aarch64__
enum class Arm { kDotProd, kFhm, kI8mm, kBf16 };

// Whether the processor has an extension.
bool has(Arm extension) {
#if defined(__linux__)
    // Bits of the kernel's documentation of hwcaps. Headers may be older than the processor.
    constexpr struct {
        unsigned long vector;
        int bit;
    } kHwcaps[] = {{AT_HWCAP, 20}, {AT_HWCAP, 23}, {AT_HWCAP2, 13}, {AT_HWCAP2, 14}};
    const auto& hwcap = kHwcaps[static_cast<int>(extension)];
    return getauxval(hwcap.vector) >> hwcap.bit & 1;
#elif defined(__APPLE__)
    constexpr const char* kNames[] = {"hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_FHM", "hw.optional.arm.FEAT_I8MM",
                                      "hw.optional.arm.FEAT_BF16"};
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(kNames[static_cast<int>(extension)], &value, &size, nullptr, 0) == 0 && value != 0;
#else
    return false;
#endif
}
#endif

// Names of the instruction sets that the processor has, whether they were built or not, from the slowest to the fastest.
std::vector<const char*> supported() {
    std::vector<const char*> found{"generic"};
#ifdef __aarch64__
    found.push_back("neon");
    if (!has(Arm::kFhm) || !has(Arm::kDotProd)) return found;
    found.push_back("neon_fp16");
    if (has(Arm::kBf16) && has(Arm::kI8mm)) found.push_back("neon_bf16");
#endif
#ifdef FA_BUILD_X86
    __builtin_cpu_init();
    constexpr int kEax = 0, kEdx = 3;
    // __builtin_cpu_supports also asks whether the operating system saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    unsigned regs[4] = {};
    const bool f16c = __get_cpuid(1, &regs[0], &regs[1], &regs[2], &regs[3]) && (regs[2] >> 29 & 1);
    if (!avx2 || !f16c) return found;
    found.push_back("avx2");
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512dq"))
        return found;
    found.push_back("avx512");
    if (!leaf7_bit(1, kEax, 5) || !__builtin_cpu_supports("avx512vnni")) return found;
    found.push_back("avx512_bf16");
    // On Intel's processors a product of pairs takes twice as long as a multiply-add, and weights are rounded for nothing.
    if (__builtin_cpu_is("intel")) std::swap(found.back(), found[found.size() - 2]);
    const bool amx = leaf7_bit(0, kEdx, 22) && leaf7_bit(0, kEdx, 24) && leaf7_bit(0, kEdx, 25);  // bfloat16, tiles, int8
    if (amx && may_use_amx()) found.push_back("amx_bf16");
#endif
    return found;
}

const Kernels* built(const char* name) {
#define FA_ISA(isa) \
    if (std::strcmp(name, #isa) == 0) return &isa::kernels;
    FA_ISAS
#undef FA_ISA
    return nullptr;
}

const std::vector<const Kernels*>& isas() {
    static const std::vector<const Kernels*> found = [] {
        std::vector<const Kernels*> kernels;
        for (const char* name : supported())
            if (const Kernels* of = built(name)) kernels.push_back(of);
        return kernels;
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
#ifdef __aarch64__
    if (dot == Int8Dot::kDotProd) return has(Arm::kDotProd);
#endif
    return dot == Int8Dot::kAmx || dot == Int8Dot::kI8mm;  // what lists their kernels asks for them
}

}  // namespace fastattention

// What a caller asks before it uses a library: which interface it has, and which of the libraries this machine can run.
#include "kpt_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)
bool has_f16c() {
    // Not every compiler's __builtin_cpu_supports knows the name.
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}

// AMX for bfloat16, once Linux has let this process use its registers.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr unsigned has_bf16 = 1u << 22, has_tiles = 1u << 24;
    constexpr long ask_for_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if ((edx & has_bf16) == 0 || (edx & has_tiles) == 0) return false;
    return syscall(SYS_arch_prctl, ask_for_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace

extern "C" int32_t kpt_cpu_interface(void) { return KPT_CPU_INTERFACE; }

extern "C" const char* kpt_cpu_instruction_sets(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    // These ask the operating system too, whether it keeps the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                             __builtin_cpu_supports("avx512vbmi2");
    if (avx512_bf16 && may_use_tiles()) return "amx_bf16 avx512_bf16 avx512 avx2 baseline";
    if (avx512_bf16) return "avx512_bf16 avx512 avx2 baseline";
    if (avx512) return "avx512 avx2 baseline";
    if (avx2) return "avx2 baseline";
#endif
    return "baseline";
}

// All kernels for one instruction set. Compiled once for each: see kernels/build.py for the flags.
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "lora.h"

namespace lorafleet {
namespace LF_ISA {

template <class Args, void (*for_f32)(const Args&), void (*for_bf16)(const Args&)>
static void by_dtype(const Args& args) {
  args.dtype == DType::bf16 ? for_bf16(args) : for_f32(args);
}

}  // namespace LF_ISA

#define LF_STRING_OF(name) #name
#define LF_STRING(name) LF_STRING_OF(name)
#define LF_BY_DTYPE(Args, kernel) LF_ISA::by_dtype<Args, LF_ISA::kernel<float>, LF_ISA::kernel<LF_ISA::bf16>>

extern const KernelTable LF_TABLE = {
    LF_STRING(LF_ISA),
    LF_BY_DTYPE(LinearArgs, linear),
    LF_BY_DTYPE(LoRAArgs, lora_apply),
    LF_BY_DTYPE(AttentionArgs, paged_attention),
    LF_BY_DTYPE(RmsNormArgs, rms_norm),
    LF_BY_DTYPE(SiluAndMulArgs, silu_and_mul),
    LF_BY_DTYPE(RopeArgs, apply_rope),
};

}  // namespace lorafleet

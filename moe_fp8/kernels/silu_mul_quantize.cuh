// Takes SiLU(gate) * up of x [.., 2k] bf16 and quantizes it to FP8 e4m3 with one scale for each 1 x 128 group. The scales are
// MN-major. The gate is columns 0 to k - 1 of a row, and up is the other columns. These formulas are computed in fp32, and then
// common/quantize.cuh's formula takes y:
//
//   gate = min(gate, limit);  up = clamp(up, -limit, limit);  y = gate / (1 + exp(-gate)) * up
//
// exp and the reciprocal are the hardware's functions. Their relative error is below 5e-6. This error moves a scale by some units
// in the last place, and a value by one rounding step at most. For gates below -87 the reciprocal is 0, and so y is 0.
//
// With ROUNDED, gate / (1 + exp(-gate)) is rounded to bf16, and so is y, as in a layer whose steps all end in bf16. Then
// div.full computes the quotient, as in engines' kernels, so that both round the same numbers.
//
// A tile is kRows rows of one group. Eight threads share a group of a row. Thread i takes eight values from 8 i on and eight from
// 64 + 8 i on, so that each of its four loads of 16 bytes is a part of a whole line, and all four are in flight at once. Neighbours
// then exchange eight bytes, so that each thread makes one store of 16. The experts of the masked layout are walked as the GEMM
// walks them (sched/segments.cuh): in windows of 32 experts, where experts without rows cost nothing.
//
// The clamp is no macro: without it `limit` is infinite.
//
// The kernel is specialized by MASKED, POWER_OF_TWO and ROUNDED.
#pragma once

#include "common/quantize.cuh"
#include "common/silu.cuh"
#include "common/types.cuh"
#include "ptx/sync.cuh"
#include "sched/segments.cuh"

struct SiluMulQuantizeParams {
    const void* x;
    const int* masked_m;    // [num_experts] if MASKED
    uint8_t* q;             // [num_experts, m, k] contiguous
    float* scale;           // [num_experts, m, k / 128], a whole matrix for each expert
    int64_t expert_stride;  // elements between experts of x
    int64_t row_stride;     // elements between rows of x
    int64_t scale_stride;   // elements between groups
    int m;                  // rows of one expert's buffer
    int k;
    int num_experts;
    float limit;
};

namespace moe_fp8 {

constexpr int kSiluValues = 2 * kQuantizeValues;
constexpr int kThreadsPerGroup = kBlockK / kSiluValues;
constexpr int kRows = NUM_THREADS / kThreadsPerGroup;
static_assert(NUM_THREADS % kWarp == 0 && CLUSTER_SIZE == 1 && SMEM_BYTES == 0, "see specs.py");

// The rows and the group that a tile covers.
struct Rows {
    int expert = 0;
    int first = 0;  // first row within the expert's buffer
    int end = 0;    // behind the expert's last row
    int group = 0;
};

// Walks the tiles of one CTA, whole warps at a time. There are fewer than 2^31 tiles, since each tile has 128 bytes of q or more.
class Walk {
   public:
    DEVICE explicit Walk(const SiluMulQuantizeParams& p)
        : window_(p.masked_m, p.num_experts, p.m, p.k / kBlockK), m_(p.m), groups_(p.k / kBlockK) {
        if constexpr (MASKED != 0) window_.start();
    }

    DEVICE bool next(Rows& rows) {
        sched::Segment segment = {0, 0, 0, 0, m_};
        if constexpr (MASKED != 0) {
            if (!window_.find(tile_, segment)) return false;
        } else if (tile_ >= ceil_div(m_, kRows) * groups_) {
            return false;
        }
        const uint32_t local = tile_ - segment.first_unit, block = local / static_cast<uint32_t>(groups_);
        rows.expert = segment.expert, rows.first = block * kRows, rows.end = segment.num_rows;
        rows.group = local - block * groups_;
        tile_ += static_cast<int>(gridDim.x);
        return true;
    }

   private:
    sched::SegmentWindow<sched::Layout::kMasked, sched::Division<kRows, false>> window_;
    int m_, groups_, tile_ = static_cast<int>(blockIdx.x);
};

}  // namespace moe_fp8

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
    silu_mul_quantize(const __grid_constant__ SiluMulQuantizeParams p) {
    using namespace moe_fp8;
    ptx::grid_dependency_wait();
    ptx::launch_dependents();
    const int within = static_cast<int>(threadIdx.x) % kThreadsPerGroup;
    Walk walk(p);
    Rows rows;
    while (walk.next(rows)) {
        const int row = rows.first + static_cast<int>(threadIdx.x) / kThreadsPerGroup;
        const bool inside = row < rows.end;

        float v[kSiluValues] = {};
        if (inside) {
            const int64_t gate = rows.expert * p.expert_stride + row * p.row_stride + rows.group * kBlockK + within * kQuantizeValues;
            float gates[2][kQuantizeValues], ups[2][kQuantizeValues];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                load_values<InDtype::kBf16>(p.x, gate + half * (kBlockK / 2), gates[half]);
                load_values<InDtype::kBf16>(p.x, gate + p.k + half * (kBlockK / 2), ups[half]);
            }
#pragma unroll
            for (int i = 0; i < kSiluValues; ++i) {
                const int half = i / kQuantizeValues, at = i % kQuantizeValues;
                v[i] = silu_mul<ROUNDED != 0>(gates[half][at], ups[half][at], p.limit);
            }
        }
        uint32_t packed[kSiluValues / 4];
        const float scale = quantize_group<kThreadsPerGroup, POWER_OF_TWO != 0>(v, packed);

        // An even thread gets its neighbour's lower eight bytes and gives its own upper eight bytes.
        const bool odd = within % 2 != 0;
        const uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? packed[0] : packed[2], 1);
        const uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? packed[1] : packed[3], 1);
        if (inside) {
            const int64_t out_row = static_cast<int64_t>(rows.expert) * p.m + row;
            const int column = odd ? kBlockK / 2 + (within - 1) * kQuantizeValues : within * kQuantizeValues;
            *reinterpret_cast<uint4*>(p.q + out_row * p.k + rows.group * kBlockK + column) =
                odd ? make_uint4(x, y, packed[2], packed[3]) : make_uint4(packed[0], packed[1], x, y);
            if (within == 0) {
                const int64_t matrix = rows.expert * p.scale_stride * (p.k / kBlockK);
                p.scale[matrix + rows.group * p.scale_stride + row] = scale;
            }
        }
    }
}

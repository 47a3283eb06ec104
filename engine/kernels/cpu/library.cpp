// Entry points of the library. Built for one head dim (-DTURNKEEP_HEAD_DIM=64), a multiple of 16 up to 256, so that a build takes
// seconds.
#include <atomic>

#include "attention_plan.h"
#include "decoder.h"
#include "sampling.h"

namespace turnkeep {
namespace {

std::atomic<bool> amx_allowed{false};

template <class T>
void attention(const AttentionArgs& a) {
    constexpr int D = TURNKEEP_HEAD_DIM;
    Team& team = *static_cast<Team*>(a.team);
    const Plan plan = make_plan(a, team.size());
    std::unique_ptr<float[]> scratch(plan.scratch ? new float[plan.scratch] : nullptr);
    Team::Pass pass(team);
    attend<T, D>(team, a, plan, scratch.get(), amx_allowed.load(std::memory_order_relaxed));
}

}  // namespace
}  // namespace turnkeep

// All else is hidden: what a thread keeps would otherwise be one for all libraries of a process, whose layouts differ.
#pragma GCC visibility push(default)
extern "C" {

// What this build can use: 1 for AMX bfloat16 (asks the kernel for the tile registers), else 0.
int turnkeep_init() {
    turnkeep::amx_allowed = turnkeep::request_amx();
    return turnkeep::amx_allowed ? 1 : 0;
}

// Whether attention over many rows takes its products in half precision (attention_many.h).
int turnkeep_half_products() {
#ifdef TURNKEEP_FP16
    return 1;
#else
    return 0;
#endif
}

// The threads that kernels run on; one call at a time uses them.
void* turnkeep_team_new(int threads) { return new turnkeep::Team(threads); }
void turnkeep_team_delete(void* team) { delete static_cast<turnkeep::Team*>(team); }

// 0: done; 1: built for another head_dim; 2: unknown dtype.
int turnkeep_attention(const turnkeep::AttentionArgs* a) {
    if (a->head_dim != TURNKEEP_HEAD_DIM) return 1;
    switch (a->dtype) {
        case 0: turnkeep::attention<float>(*a); return 0;
        case 1: turnkeep::attention<turnkeep::BFloat16>(*a); return 0;
        case 2: turnkeep::attention<turnkeep::Float16>(*a); return 0;
        case 3: turnkeep::attention<turnkeep::Int8>(*a); return 0;
    }
    return 2;
}

// Stores k and v, [tokens][kv head][dim] with the given strides, in their slots. 0: done; 1: built for another head_dim.
int turnkeep_write(const turnkeep::WriteArgs* w) {
    if (w->dim != TURNKEEP_HEAD_DIM) return 1;
    turnkeep::write_rows<TURNKEEP_HEAD_DIM>(*w);
    return 0;
}

// Packs a matrix (matrix.h); `out` of the arguments holds turnkeep_matrix_bytes(format, n, k).
int64_t turnkeep_matrix_bytes(int64_t format, int64_t n, int64_t k) { return turnkeep::matrix_bytes(format, n, k); }
void turnkeep_pack_matrix(const turnkeep::PackArgs* p) { turnkeep::pack_matrix(*p); }

// Chooses a token for every row of logits.
void turnkeep_sample(const turnkeep::SampleArgs* a) { turnkeep::sample(*a); }

// Whether this build on this machine multiplies a format by a method (product.h).
int turnkeep_has_method(int64_t format, int32_t method) { return turnkeep::has_method(format, method, turnkeep::amx_allowed); }

// Log-probabilities of tokens.
void turnkeep_report(const turnkeep::ReportArgs* r) { turnkeep::report(*r); }

// out [m, n] = x [m, k] W^T, float32 rows.
void turnkeep_multiply(const turnkeep::MultiplyArgs* a) { turnkeep::multiply_rows(*a); }

// One forward pass. 0: done; 1: built for another head_dim; 2: unknown KV dtype; 3: cancelled.
int turnkeep_forward(const turnkeep::ForwardArgs* f) {
    using namespace turnkeep;
    constexpr int D = TURNKEEP_HEAD_DIM;
    if (f->attention.head_dim != D) return 1;
    const bool amx = amx_allowed.load(std::memory_order_relaxed);
    switch (f->attention.dtype) {
        case 0: return ForwardPass<D>(*f, memory_of<D, float>()).run(amx) ? 0 : 3;
        case 1: return ForwardPass<D>(*f, memory_of<D, BFloat16>()).run(amx) ? 0 : 3;
        case 2: return ForwardPass<D>(*f, memory_of<D, Float16>()).run(amx) ? 0 : 3;
        case 3: return ForwardPass<D>(*f, memory_of<D, Int8>()).run(amx) ? 0 : 3;
    }
    return 2;
}
}
#pragma GCC visibility pop

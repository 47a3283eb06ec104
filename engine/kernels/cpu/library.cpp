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

extern "C" {

// What this build can use: 1 for AMX bfloat16 (asks the kernel for the tile registers), else 0.
int turnkeep_init() {
    turnkeep::amx_allowed = turnkeep::request_amx();
    return turnkeep::amx_allowed ? 1 : 0;
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
    }
    return 2;
}

// Stores k and v, [tokens][kv head][dim] with the given strides (elements of `size` bytes), in their slots.
void turnkeep_write(const turnkeep::WriteArgs* w) {
    for (int64_t t = 0; t < w->tokens; t++) {
        const int64_t block = w->slots[t] / w->block_size, offset = w->slots[t] % w->block_size;
        char* to = w->kv + (block * w->kv_block + offset * w->kv_token) * w->size;
        for (int64_t h = 0; h < w->kv_heads; h++) {
            memcpy(to + h * w->kv_head * w->size, w->k + (t * w->k_token + h * w->k_head) * w->size, w->dim * w->size);
            memcpy(to + (w->kv_side + h * w->kv_head) * w->size, w->v + (t * w->v_token + h * w->v_head) * w->size,
                   w->dim * w->size);
        }
    }
}

// Chooses a token for every row of logits.
void turnkeep_sample(const turnkeep::SampleArgs* a) { turnkeep::sample(*a); }

// Log-probabilities of tokens.
void turnkeep_report(const turnkeep::ReportArgs* r) { turnkeep::report(*r); }

// Packs a row-major bfloat16 matrix [n, k] for turnkeep_forward; `out` holds turnkeep_packed_size(n, k) elements.
int64_t turnkeep_packed_size(int64_t n, int64_t k) { return turnkeep::packed_size(n, k); }
void turnkeep_pack(const uint16_t* w, int64_t n, int64_t k, int paired, uint16_t* out) { turnkeep::pack(w, n, k, paired, out); }

// One forward pass. 0: done; 1: built for another head_dim; 3: this machine has no AMX.
int turnkeep_forward(const turnkeep::ForwardArgs* f) {
    if (f->attention.head_dim != TURNKEEP_HEAD_DIM) return 1;
#ifdef TURNKEEP_AMX
    if constexpr (TURNKEEP_HEAD_DIM % 32 == 0) {
        if (!turnkeep::amx_allowed) return 3;
        turnkeep::forward<TURNKEEP_HEAD_DIM>(*f);
        return 0;
    }
#endif
    return 3;
}
}

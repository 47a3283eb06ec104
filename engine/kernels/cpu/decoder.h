// A whole forward pass of a Llama-family decoder in bfloat16 on AMX, in one call: the threads stay together from the embedding to
// the logits, and nothing of a step runs in Python. Weights are packed once into the order in which tiles are read. The residual
// stream stays in float32; what goes into a matrix product is rounded to bfloat16, as the weights are.
#pragma once
#include <cstdint>
#include <cstring>

#include "attention_plan.h"

namespace turnkeep {

// Packed order: per 32 output columns, per 32 input dims: two tiles [dim pair 16][column 16][2]. `paired`: the matrix is [gate; up],
// and the two tiles of a block are the same 16 columns of gate and of up, so that SiLU(gate) * up needs no second pass.
static inline int64_t packed_size(int64_t n, int64_t k) { return (n + 31) / 32 * 32 * k; }

static inline void pack(const uint16_t* w, int64_t n, int64_t k, int paired, uint16_t* out) {
    const int64_t blocks = (n + 31) / 32, half = n / 2;
    for (int64_t b = 0; b < blocks; b++) {
        uint16_t* to = out + b * 32 * k;
        for (int64_t d = 0; d < k; d += 32)
            for (int tile = 0; tile < 2; tile++)
                for (int pair = 0; pair < 16; pair++)
                    for (int c = 0; c < 16; c++) {
                        const int64_t column = paired ? tile * half + b * 16 + c : b * 32 + tile * 16 + c;
                        for (int i = 0; i < 2; i++)
                            *to++ = column < n ? w[column * k + d + pair * 2 + i] : 0;
                    }
    }
}

// Mirrors engine/kernels/cpu/decoder.py. Norm weights and biases are float32; null where a model has none.
struct LayerWeights {
    const uint16_t* qkv;
    const uint16_t* o;
    const uint16_t* gate_up;
    const uint16_t* down;
    const float* qkv_bias;
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;
    const float* k_norm;
    int64_t window;
};

struct ForwardArgs {
    AttentionArgs attention;  // kv points at layer 0; q and out are filled in here
    const LayerWeights* layers;
    const uint16_t* embedding;  // [vocab, hidden], row-major
    const uint16_t* head;       // packed
    const float* final_norm;
    const int64_t* token_ids;
    const int64_t* slots;
    const float* cos;  // [T, head_dim / 2]
    const float* sin;
    const int64_t* logit_rows;  // which tokens get logits
    float* logits;              // [logit rows, vocab]
    float* workspace;
    int64_t kv_layer;  // stride between layers, in elements
    int32_t num_layers, num_tokens, hidden, intermediate, vocab, num_logit_rows;
    float norm_epsilon;
};

#ifdef TURNKEEP_AMX

// Up to 32 rows x 32 columns of x W^T into `c` [32][32]. x: row-major with `k` elements a row.
static inline void product_block(const uint16_t* x, int rows, const uint16_t* w, int k, float* c) {
    const int upper = std::min(rows, 16), lower = std::max(rows - 16, 0);
    tile_shape().set(upper, lower);
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < k; d += 32) {
            _tile_loadd(6, w + d * 32, 64);
            _tile_loadd(7, w + d * 32 + 512, 64);
            _tile_loadd(4, x + d, k * 2);
            _tile_loadd(5, x + 16 * k + d, k * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, c + 512, 128);
        _tile_stored(3, c + 528, 128);
    } else {
        for (int d = 0; d < k; d += 32) {
            _tile_loadd(4, x + d, k * 2);
            _tile_loadd(6, w + d * 32, 64);
            _tile_loadd(7, w + d * 32 + 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
}

constexpr int kRowChunk = 256;  // rows whose activations stay in the second-level cache while weights stream past

// x [m, k] times packed W [n, k]^T; `done(row, column, values)` takes each row's 32 results.
template <class Done>
static inline void multiply(Team& team, const uint16_t* x, int m, int k, const uint16_t* w, int n, const Done& done) {
    const int64_t blocks = (n + 31) / 32, chunks = (m + kRowChunk - 1) / kRowChunk;
    const int64_t grain = m <= 32 ? 4 : 1;  // blocks a thread takes at once: one short row is soon multiplied
    const int64_t groups = (blocks + grain - 1) / grain;
    team.run(chunks * groups, [&](int64_t i) {
        alignas(64) float c[32 * 32];
        const int begin = int(i / groups) * kRowChunk, end = std::min(m, begin + kRowChunk);
        const int64_t last = std::min(blocks, (i % groups + 1) * grain);
        for (int64_t b = i % groups * grain; b < last; b++) {
            for (int r = begin; r < end; r += 32) {
                const int rows = std::min(32, end - r);
                product_block(x + int64_t(r) * k, rows, w + b * 32 * k, k, c);
                for (int j = 0; j < rows; j++) done(r + j, int(b) * 32, c + j * 32);
            }
        }
    });
}

static inline void store_bf16(uint16_t* p, __m512 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

static inline __m512 load_bf16(const uint16_t* p) {
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// Zhang and Sennrich, arXiv 1910.07467. n is a multiple of 16.
static inline void rms_norm(const float* x, const float* weight, int n, float epsilon, uint16_t* out) {
    __m512 squares = _mm512_setzero_ps();
    for (int i = 0; i < n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(n) + epsilon));
    for (int i = 0; i < n; i += 16)
        store_bf16(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
}

static inline __m512 silu(__m512 x) {
    // x / (1 + 2^(-x log2 e)); the exponential through its even half so that both signs stay in range
    const __m512 y = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-1.44269504f));
    const __m512 r = _mm512_reduce_ps(y, 0x00);
    __m512 p = _mm512_set1_ps(0.00133898f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00961813f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.05550411f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022651f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314718f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512 e = _mm512_scalef_ps(p, _mm512_sub_ps(y, r));  // e^-|x|
    const __m512 one = _mm512_set1_ps(1.0f);
    const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
    const __m512 numerator = _mm512_mask_mov_ps(one, negative, e);  // sigmoid(x) = 1/(1+e^-x) or e^x/(1+e^x)
    return _mm512_mul_ps(x, _mm512_div_ps(numerator, _mm512_add_ps(one, e)));
}

// One head: optional RMSNorm over it, then rotary embedding in the half-split order of Llama checkpoints.
template <int D>
static inline void rotate_head(const uint16_t* from, const float* norm, float epsilon, const float* cos, const float* sin,
                               uint16_t* to) {
    alignas(64) float x[D];
    for (int d = 0; d < D; d += 16) _mm512_store_ps(x + d, load_bf16(from + d));
    if (norm) {
        float squares = 0;
        for (int d = 0; d < D; d++) squares += x[d] * x[d];
        const float scale = 1.0f / std::sqrt(squares / float(D) + epsilon);
        for (int d = 0; d < D; d++) x[d] = x[d] * scale * norm[d];
    }
    for (int d = 0; d < D / 2; d += 16) {
        const __m512 a = _mm512_load_ps(x + d), b = _mm512_loadu_ps(x + D / 2 + d);
        const __m512 c = _mm512_loadu_ps(cos + d), s = _mm512_loadu_ps(sin + d);
        store_bf16(to + d, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        store_bf16(to + D / 2 + d, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

// Floats of workspace a pass over `tokens` tokens needs (mirrored in decoder.py).
static inline int64_t workspace_floats(const ForwardArgs& f, int64_t width) {
    const int64_t t = f.num_tokens;
    const int64_t halves = t * (f.hidden + width + int64_t(f.attention.num_heads) * f.attention.head_dim * 2 + f.intermediate);
    return t * f.hidden + (halves + 1) / 2 + 64;
}

template <int D>
void forward(const ForwardArgs& f) {
    static_assert(D % 32 == 0, "half a head is rotated 16 dims at a time");
    const AttentionArgs& base = f.attention;
    Team& team = *static_cast<Team*>(base.team);
    const int tokens = f.num_tokens, hidden = f.hidden, inner = f.intermediate;
    const int heads = base.num_heads, kv_heads = base.num_kv_heads;
    const int width = (heads + 2 * kv_heads) * D;
    float* residual = f.workspace;
    uint16_t* normed = reinterpret_cast<uint16_t*>(residual + int64_t(tokens) * hidden);
    uint16_t* qkv = normed + int64_t(tokens) * hidden;
    uint16_t* query = qkv + int64_t(tokens) * width;
    uint16_t* attended = query + int64_t(tokens) * heads * D;
    uint16_t* gated = attended + int64_t(tokens) * heads * D;

    // Layers may differ in their window; each distinct one is planned once.
    std::vector<Plan> plans;
    std::vector<int> plan_of(f.num_layers);
    std::vector<int64_t> windows;
    int64_t scratch_floats = 0;
    AttentionArgs args = base;
    args.q = query;
    args.out = attended;
    args.q_token = args.out_token = int64_t(heads) * D;
    args.q_head = args.out_head = D;
    args.dtype = 1;
    for (int l = 0; l < f.num_layers; l++) {
        const int64_t window = f.layers[l].window;
        size_t i = 0;
        while (i < windows.size() && windows[i] != window) i++;
        if (i == windows.size()) {
            windows.push_back(window);
            args.window = int32_t(window);
            plans.push_back(make_plan(args, team.size()));
            scratch_floats = std::max(scratch_floats, plans.back().scratch);
        }
        plan_of[l] = int(i);
    }
    std::unique_ptr<float[]> scratch(scratch_floats ? new float[scratch_floats] : nullptr);

    Team::Pass pass(team);
    // Row-wise work is handed out a few rows at a time.
    const auto for_rows = [&](int rows, const auto& work) {
        constexpr int kGrain = 4;
        team.run((rows + kGrain - 1) / kGrain, [&](int64_t i) {
            const int end = std::min(rows, int(i + 1) * kGrain);
            for (int r = int(i) * kGrain; r < end; r++) work(r);
        });
    };
    const auto add_to_residual = [&](int row, int column, const float* c) {
        float* to = residual + int64_t(row) * hidden + column;
        for (int i = 0; i < 32 && column + i < hidden; i += 16)
            _mm512_storeu_ps(to + i, _mm512_add_ps(_mm512_loadu_ps(to + i), _mm512_load_ps(c + i)));
    };
    const auto normalise = [&](const float* weight) {
        for_rows(tokens, [&](int t) {
            rms_norm(residual + int64_t(t) * hidden, weight, hidden, f.norm_epsilon, normed + int64_t(t) * hidden);
        });
    };

    for_rows(tokens, [&](int t) {
        const uint16_t* row = f.embedding + f.token_ids[t] * hidden;
        for (int i = 0; i < hidden; i += 16) _mm512_storeu_ps(residual + int64_t(t) * hidden + i, load_bf16(row + i));
    });
    for (int l = 0; l < f.num_layers; l++) {
        const LayerWeights& layer = f.layers[l];
        uint16_t* kv = static_cast<uint16_t*>(const_cast<void*>(base.kv)) + l * f.kv_layer;
        normalise(layer.input_norm);
        multiply(team, normed, tokens, hidden, layer.qkv, width, [&](int row, int column, const float* c) {
            for (int i = 0; i < 32 && column + i < width; i += 16) {
                __m512 v = _mm512_load_ps(c + i);
                if (layer.qkv_bias) v = _mm512_add_ps(v, _mm512_loadu_ps(layer.qkv_bias + column + i));
                store_bf16(qkv + int64_t(row) * width + column + i, v);
            }
        });
        for_rows(tokens, [&](int t) {
            const float* cos = f.cos + int64_t(t) * (D / 2);
            const float* sin = f.sin + int64_t(t) * (D / 2);
            const uint16_t* row = qkv + int64_t(t) * width;
            for (int h = 0; h < heads; h++)
                rotate_head<D>(row + h * D, layer.q_norm, f.norm_epsilon, cos, sin, query + (int64_t(t) * heads + h) * D);
            const int64_t block = f.slots[t] / base.block_size, offset = f.slots[t] % base.block_size;
            uint16_t* slot = kv + block * base.kv_block + offset * base.kv_token;
            for (int h = 0; h < kv_heads; h++) {
                rotate_head<D>(row + (heads + h) * D, layer.k_norm, f.norm_epsilon, cos, sin, slot + h * base.kv_head);
                memcpy(slot + base.kv_side + h * base.kv_head, row + (heads + kv_heads + h) * D, D * 2);
            }
        });
        args.kv = kv;
        args.window = int32_t(layer.window);
        attend<BFloat16, D>(team, args, plans[plan_of[l]], scratch.get(), true);
        multiply(team, attended, tokens, heads * D, layer.o, hidden, add_to_residual);
        normalise(layer.post_norm);
        multiply(team, normed, tokens, hidden, layer.gate_up, 2 * inner, [&](int row, int column, const float* c) {
            const __m512 product = _mm512_mul_ps(silu(_mm512_load_ps(c)), _mm512_load_ps(c + 16));
            store_bf16(gated + int64_t(row) * inner + column / 2, product);
        });
        multiply(team, gated, tokens, inner, layer.down, hidden, add_to_residual);
    }
    const int rows = f.num_logit_rows;
    for_rows(rows, [&](int r) {
        rms_norm(residual + f.logit_rows[r] * hidden, f.final_norm, hidden, f.norm_epsilon, normed + int64_t(r) * hidden);
    });
    multiply(team, normed, rows, hidden, f.head, f.vocab, [&](int row, int column, const float* c) {
        memcpy(f.logits + int64_t(row) * f.vocab + column, c, std::min(32, f.vocab - column) * sizeof(float));
    });
}
#endif

}  // namespace turnkeep

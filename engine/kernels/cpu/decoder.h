// A whole forward pass of a Llama-family decoder in one call: the threads stay together from the embedding to the logits, and nothing
// of a step runs in Python. The residual stream and what lies between products are float32; a product reads its left side in the
// form that its method wants (operand.h).
//
// Few tokens (decode): the columns of every product are shared out, and the weights stream past once. Many tokens (prefill): the rows
// are. A thread takes some dozens of them through everything between two attentions, so that what it has computed stays in its own
// cache, and the weights, which all read, come from the shared one.
#pragma once
#include <cstdint>
#include <cstring>

#include "attention_plan.h"
#include "product.h"

namespace turnkeep {

// Mirrors engine/kernels/cpu/decoder.py. Norm weights and biases are float32; null where a model has none.
struct LayerWeights {
    Matrix qkv, out, gate_up, down;
    const float* qkv_bias;
    const float* input_norm;
    const float* post_norm;
    const float* q_norm;
    const float* k_norm;
    int64_t window;
};

// Which method multiplies a format: `few` for up to `few_rows` rows, else `many`. One for each format.
struct MethodChoice {
    int32_t few, many, few_rows;
};

struct ForwardArgs {
    AttentionArgs attention;  // kv points at layer 0; q and out are filled in here; dtype is that of the KV
    const LayerWeights* layers;
    const void* embedding;  // [vocab, hidden], row-major, of embedding_dtype (0: float32, 1: bfloat16, 2: float16)
    Matrix head;
    const float* final_norm;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slots;
    const float* cos;  // [positions, head_dim / 2]
    const float* sin;
    const int64_t* logit_rows;  // which tokens get logits
    float* logits;              // [logit rows, vocab]
    const int32_t* cancelled;   // null, or: the pass ends before its next layer once this is not 0
    int64_t kv_layer;           // stride between layers, in elements
    int32_t num_layers, num_tokens, hidden, intermediate, vocab, num_logit_rows;
    int32_t embedding_dtype;
    float norm_epsilon;
    MethodChoice choices[6];
};

static inline int32_t method_of(const ForwardArgs& f, const Matrix& w, int rows) {
    const MethodChoice& choice = f.choices[w.format];
    return rows <= choice.few_rows ? choice.few : choice.many;
}

// Zhang and Sennrich, arXiv 1910.07467. n is a multiple of 16.
static inline void rms_norm(const float* x, const float* weight, int n, float epsilon, float* out) {
    Vec squares = splat(0.0f);
    for (int i = 0; i < n; i += kLanes) squares += load(x + i) * load(x + i);
    const float scale = 1.0f / std::sqrt(sum_lanes(squares) / float(n) + epsilon);
    for (int i = 0; i < n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
}

// 1 / x for x in [1, 2], to the last bit or one beside it. Division takes as long as a dozen multiplications.
static inline Vec inverse(Vec x) {
#if defined(__AVX512F__)
    const __m512 y = _mm512_rcp14_ps((__m512)x);
    return (Vec)_mm512_mul_ps(y, _mm512_fnmadd_ps((__m512)x, y, _mm512_set1_ps(2.0f)));
#else
    return splat(1.0f) / x;
#endif
}

// x sigmoid(x); the exponential of -|x|, so that both signs stay in range.
static inline Vec silu(Vec x) {
    const Vec zero = splat(0.0f), one = splat(1.0f);
    const Vec e = exp_nonpositive(x < zero ? x : -x);
    return x * (x < zero ? e : one) * inverse(one + e);
}

// One head, in place: optional RMSNorm over it, then rotary embedding in the half-split order of Llama checkpoints.
template <int D>
static inline void rotate_head(float* x, const float* norm, float epsilon, const float* cos, const float* sin) {
    if (norm) rms_norm(x, norm, D, epsilon, x);
    for (int d = 0; d < D / 2; d++) {
        const float a = x[d], b = x[D / 2 + d];
        x[d] = a * cos[d] - b * sin[d];
        x[D / 2 + d] = b * cos[d] + a * sin[d];
    }
}

template <class T>
static inline void load_row(float* to, const T* from, int n) {
    for (int d = 0; d < n; d += kLanes) store(to + d, load(from + d));
}

// What depends on the type of the KV memory, so that the rest of the pass is compiled once.
struct Memory {
    int64_t kv_size, io_size;  // bytes of an element of the KV memory; of queries and attention's results
    void (*store_kv)(void* layer, const AttentionArgs& a, int64_t slot, int kv_head, int side, const float* row);
    void (*store_query)(void* to, const float* from);
    void (*load_attended)(float* to, const void* from, int count);
    void (*attend)(Team& team, const AttentionArgs& a, const Plan& plan, float* scratch, bool amx);
};

template <int D, class T>
static const Memory& memory_of() {
    static constexpr Memory memory = {
        sizeof(T),
        sizeof(IoOf<T>),
        store_kv_row<T, D>,
        [](void* to, const float* from) {
            for (int d = 0; d < D; d += kLanes) store(static_cast<IoOf<T>*>(to) + d, load(from + d));
        },
        [](float* to, const void* from, int count) { load_row(to, static_cast<const IoOf<T>*>(from), count); },
        attend<T, D>,
    };
    return memory;
}

// Memory that stays with its thread from one pass to the next.
static inline char* thread_memory(int64_t bytes) {
    static thread_local std::unique_ptr<char[]> memory;
    static thread_local int64_t size = 0;
    if (size < bytes) {
        memory.reset();
        memory.reset(new char[bytes + 64]);
        size = bytes;
    }
    return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
}

// A row of `k` floats of this thread's own.
static inline float* row_memory(int64_t k) {
    static thread_local std::vector<float> row;
    if (int64_t(row.size()) < k) row.resize(k);
    return row.data();
}

constexpr int kSharedRows = 48;  // fewer rows a thread than this, and the columns are shared out instead
constexpr int kOwnRows = 96;     // rows that a thread takes through a layer at once

template <int D>
class ForwardPass {
  public:
    ForwardPass(const ForwardArgs& f, const Memory& memory)
        : f_(f),
          memory_(memory),
          team_(*static_cast<Team*>(f.attention.team)),
          heads_(f.attention.num_heads),
          kv_heads_(f.attention.num_kv_heads),
          width_((heads_ + 2 * kv_heads_) * D) {}

    // False: it was cancelled, and there are no logits.
    bool run(bool amx) {
        const int tokens = f_.num_tokens;
        const bool by_rows = tokens >= kSharedRows * team_.size();
        const int own_rows = by_rows ? own_rows_of(tokens) : tokens;
        const int64_t local = layer_bytes(own_rows);
        const int64_t shared = bytes<float>(int64_t(tokens) * f_.hidden) + 2 * bytes<char>(int64_t(tokens) * heads_ * D * memory_.io_size) +
                               operand_bytes(f_.num_logit_rows, f_.hidden) + (by_rows ? 0 : local);
        Team::Pass pass(team_);
        Arena arena(team_.memory(shared));
        residual_ = arena.take<float>(int64_t(tokens) * f_.hidden);
        query_ = arena.take<char>(int64_t(tokens) * heads_ * D * memory_.io_size);
        attended_ = arena.take<char>(int64_t(tokens) * heads_ * D * memory_.io_size);
        plan_attention();
        const int64_t chunks = (tokens + own_rows - 1) / own_rows;
        for (int l = 0; l <= f_.num_layers; l++) {
            if (f_.cancelled && __atomic_load_n(f_.cancelled, __ATOMIC_RELAXED)) return false;
            if (by_rows) {
                team_.run(chunks, [&](int64_t i) {
                    const int begin = int(i) * own_rows;
                    Arena own(thread_memory(local));
                    Alone alone;
                    between_attentions(alone, l, begin, std::min(tokens, begin + own_rows), own);
                });
            } else {
                Arena own = arena;
                between_attentions(team_, l, 0, tokens, own);
            }
            if (l < f_.num_layers) attend_layer(l, amx);
        }
        logits(arena);
        return true;
    }

  private:
    template <class U>
    static int64_t bytes(int64_t count) {
        return (count * int64_t(sizeof(U)) + 63) / 64 * 64;
    }

    int64_t layer_bytes(int64_t rows) const {
        const int64_t widest = std::max<int64_t>({f_.hidden, int64_t(heads_) * D, f_.intermediate});
        return bytes<float>(rows * std::max(width_, f_.intermediate)) + operand_bytes(rows, widest);
    }

    int own_rows_of(int tokens) const {
        const int64_t least = (tokens + kOwnRows - 1) / kOwnRows;
        const int64_t chunks = (least + team_.size() - 1) / team_.size() * team_.size();
        return int((tokens + chunks - 1) / chunks + 11) / 12 * 12;
    }

    // Layers may differ in their window; each distinct one is planned once.
    void plan_attention() {
        args_ = f_.attention;
        args_.q = query_;
        args_.out = attended_;
        args_.q_token = args_.out_token = int64_t(heads_) * D;
        args_.q_head = args_.out_head = D;
        plan_of_.resize(f_.num_layers);
        std::vector<int64_t> windows;
        int64_t scratch = 0;
        for (int l = 0; l < f_.num_layers; l++) {
            const int64_t window = f_.layers[l].window;
            size_t i = 0;
            while (i < windows.size() && windows[i] != window) i++;
            if (i == windows.size()) {
                windows.push_back(window);
                args_.window = int32_t(window);
                plans_.push_back(make_plan(args_, team_.size()));
                scratch = std::max(scratch, plans_.back().scratch);
            }
            plan_of_[l] = int(i);
        }
        scratch_.reset(scratch ? new float[scratch] : nullptr);
    }

    void attend_layer(int l, bool amx) {
        args_.kv = layer_memory(l);
        args_.window = int32_t(f_.layers[l].window);
        memory_.attend(team_, args_, plans_[plan_of_[l]], scratch_.get(), amx);
    }

    char* layer_memory(int l) const {
        return static_cast<char*>(const_cast<void*>(f_.attention.kv)) + l * f_.kv_layer * memory_.kv_size;
    }

    // Row-wise work is handed out a few rows at a time.
    template <class Crew, class Work>
    static void for_rows(Crew& crew, int begin, int end, const Work& work) {
        constexpr int kGrain = 4;
        crew.run((end - begin + kGrain - 1) / kGrain, [&](int64_t i) {
            const int from = begin + int(i) * kGrain, to = std::min(end, from + kGrain);
            for (int r = from; r < to; r++) work(r);
        });
    }

    // The left side of w's product: `row(r, room)` gives row r, [k] floats, which it may write to `room`.
    template <class Crew, class Row>
    Operand operand(Crew& crew, const Matrix& w, int begin, int end, Arena& arena, const Row& row) const {
        const Operand x = new_operand(arena, w, kind_of(method_of(f_, w, f_.num_tokens)), end - begin);
        for_rows(crew, begin, end, [&](int r) { put_row_of(x, r - begin, [&](float* room) { return row(r, room); }); });
        return x;
    }

    template <class Row>
    static void put_row_of(const Operand& x, int index, const Row& row) {
        float* own = reinterpret_cast<float*>(x.data + index * x.stride);
        float* room = x.kind == kFloatRows ? own : row_memory(x.k);
        const float* from = row(room);
        if (from != own) put_row(x, index, from);
    }

    template <class Crew, class Done>
    void product(Crew& crew, const Matrix& w, const Operand& x, const Done& done) const {
        multiply(crew, w, method_of(f_, w, f_.num_tokens), x, done);
    }

    // What follows the attention of layer l - 1 (or the embedding) and precedes that of layer l, for rows [begin, end).
    template <class Crew>
    void between_attentions(Crew& crew, int l, int begin, int end, Arena& arena) {
        if (l == 0)
            for_rows(crew, begin, end, [&](int t) { embed(t); });
        else
            after_attention(crew, f_.layers[l - 1], begin, end, Arena(arena));
        if (l < f_.num_layers) before_attention(crew, l, begin, end, Arena(arena));
    }

    void embed(int t) {
        float* to = residual_ + int64_t(t) * f_.hidden;
        const int64_t from = f_.token_ids[t] * f_.hidden;
        switch (f_.embedding_dtype) {
            case 0: return load_row(to, static_cast<const float*>(f_.embedding) + from, f_.hidden);
            case 1: return load_row(to, static_cast<const BFloat16*>(f_.embedding) + from, f_.hidden);
            default: return load_row(to, static_cast<const Float16*>(f_.embedding) + from, f_.hidden);
        }
    }

    const float* normalise(int t, const float* weight, float* room) const {
        rms_norm(residual_ + int64_t(t) * f_.hidden, weight, f_.hidden, f_.norm_epsilon, room);
        return room;
    }

    const float* attended_row(int t, float* room) const {
        memory_.load_attended(room, attended_ + int64_t(t) * heads_ * D * memory_.io_size, heads_ * D);
        return room;
    }

    template <class Crew>
    void before_attention(Crew& crew, int l, int begin, int end, Arena arena) {
        const LayerWeights& layer = f_.layers[l];
        float* qkv = arena.take<float>(int64_t(end - begin) * width_);
        const Operand x = operand(crew, layer.qkv, begin, end, arena, [&](int t, float* room) { return normalise(t, layer.input_norm, room); });
        product(crew, layer.qkv, x, [&](int row, int column, const float* c) {
            for (int i = 0; i < kBlock && column + i < width_; i += kLanes) {
                Vec v = load(c + i);
                if (layer.qkv_bias) v += load(layer.qkv_bias + column + i);
                store(qkv + int64_t(row) * width_ + column + i, v);
            }
        });
        char* kv = layer_memory(l);
        for_rows(crew, begin, end, [&](int t) {
            const float* cos = f_.cos + f_.positions[t] * (D / 2);
            const float* sin = f_.sin + f_.positions[t] * (D / 2);
            float* row = qkv + int64_t(t - begin) * width_;
            for (int h = 0; h < heads_; h++) {
                rotate_head<D>(row + h * D, layer.q_norm, f_.norm_epsilon, cos, sin);
                memory_.store_query(query_ + (int64_t(t) * heads_ + h) * D * memory_.io_size, row + h * D);
            }
            for (int h = 0; h < kv_heads_; h++) {
                float* key = row + (heads_ + h) * D;
                rotate_head<D>(key, layer.k_norm, f_.norm_epsilon, cos, sin);
                memory_.store_kv(kv, f_.attention, f_.slots[t], h, 0, key);
                memory_.store_kv(kv, f_.attention, f_.slots[t], h, 1, row + (heads_ + kv_heads_ + h) * D);
            }
        });
    }

    template <class Crew>
    void after_attention(Crew& crew, const LayerWeights& layer, int begin, int end, Arena arena) {
        const auto add_to_residual = [&](int row, int column, const float* c) {
            float* to = residual_ + int64_t(begin + row) * f_.hidden + column;
            for (int i = 0; i < kBlock && column + i < f_.hidden; i += kLanes) store(to + i, load(to + i) + load(c + i));
        };
        Arena after_out = arena;
        const Operand mixed = operand(crew, layer.out, begin, end, after_out,
                                      [&](int t, float* room) { return attended_row(t, room); });
        product(crew, layer.out, mixed, add_to_residual);

        const int inner = f_.intermediate;
        float* gated = arena.take<float>(int64_t(end - begin) * inner);
        Arena after_gate = arena;
        const Operand x = operand(crew, layer.gate_up, begin, end, after_gate, [&](int t, float* room) { return normalise(t, layer.post_norm, room); });
        product(crew, layer.gate_up, x, [&](int row, int column, const float* c) {
            store(gated + int64_t(row) * inner + column / 2, silu(load(c)) * load(c + kPanel));
        });
        const Operand y = operand(crew, layer.down, begin, end, arena,
                                  [&](int t, float*) { return gated + int64_t(t - begin) * inner; });
        product(crew, layer.down, y, add_to_residual);
    }

    void logits(Arena arena) {
        const int rows = f_.num_logit_rows;
        // What decides the token is not rounded to 8 bits, however many rows there are.
        const int32_t by_rows = method_of(f_, f_.head, rows), method = by_rows == kInt8Dot ? f_.choices[f_.head.format].few : by_rows;
        const Operand x = new_operand(arena, f_.head, kind_of(method), rows);
        for_rows(team_, 0, rows, [&](int r) {
            put_row_of(x, r, [&](float* room) { return normalise(int(f_.logit_rows[r]), f_.final_norm, room); });
        });
        multiply(team_, f_.head, method, x, [&](int row, int column, const float* c) {
            memcpy(f_.logits + int64_t(row) * f_.vocab + column, c, std::min(kBlock, f_.vocab - column) * sizeof(float));
        });
    }

    const ForwardArgs& f_;
    const Memory& memory_;
    Team& team_;
    const int heads_, kv_heads_, width_;
    float* residual_ = nullptr;
    char* query_ = nullptr;
    char* attended_ = nullptr;
    AttentionArgs args_;
    std::vector<Plan> plans_;
    std::vector<int> plan_of_;
    std::unique_ptr<float[]> scratch_;
};

}  // namespace turnkeep

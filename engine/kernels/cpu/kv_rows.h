// One vector of paged KV memory, a key or a value of one KV head of one token: where it lies, and how it is written from floats.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace turnkeep {

// Mirrors engine/kernels/cpu/library.py. Strides are in elements; dtype is that of the KV memory (kv_rows.h).
struct AttentionArgs {
    const void* q;
    const void* kv;
    void* out;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t q_token, q_head;
    int64_t kv_block, kv_side, kv_head, kv_token;
    int64_t out_token, out_head;
    int64_t table_stride;
    void* team;
    int32_t num_sequences, num_heads, num_kv_heads, head_dim, block_size, window;
    int32_t dtype;
    float scale;
};

// Mirrors WriteArgs of engine/kernels/cpu/library.py. Strides are in elements: of k and v, of `size` bytes; of the KV memory, of its
// own. Keys and values are of the memory's type, for int8 memory float32.
struct WriteArgs {
    char* kv;
    const char* k;
    const char* v;
    const int64_t* slots;
    int64_t kv_block, kv_side, kv_head, kv_token;
    int64_t k_token, k_head, v_token, v_head;
    int64_t tokens, kv_heads, dim, block_size, size;
    int32_t dtype;
};

constexpr int32_t kInt8 = 3;  // of the dtypes: 0 float32, 1 bfloat16, 2 float16

// What queries and outputs are stored in beside KV memory of type T.
template <class T>
struct Io {
    using Type = T;
};
template <>
struct Io<Int8> {
    using Type = float;
};
template <class T>
using IoOf = typename Io<T>::Type;

// int8 memory: for each block, layer, side and KV head, block_size * D codes and behind them one float32 scale a token. `head` is
// where the codes begin.
template <int D>
static inline const float* row_scale(const Int8* head, int64_t block_size, int64_t offset) {
    return reinterpret_cast<const float*>(head + block_size * D) + offset;
}

constexpr float kLeastMagnitude = 1e-30f;  // a vector that is smaller throughout is stored as zero: its scale would lose bits

// The scale is max |x| / 127, the codes round(x / scale), halves to even; engine/kernels/int8_kv.py computes the same bits. A vector that holds NaN or infinity becomes NaN as a whole: no other vector shares its scale.
template <int D>
static inline void quantize_row(const float* row, Int8* codes, float* scale) {
    IVec top = {};
    for (int d = 0; d < D; d += kLanes) {
        IVec bits;
        memcpy(&bits, row + d, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    int32_t top_bits = 0;
    for (int i = 0; i < kLanes; i++) top_bits = std::max(top_bits, top[i]);
    float largest;
    memcpy(&largest, &top_bits, sizeof largest);
    const bool finite = top_bits < 0x7f800000, zero = largest < kLeastMagnitude;
    *scale = !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0.0f : largest / 127.0f;
    if (!finite || zero) {
        memset(codes, 0, D);
        return;
    }
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (int d = 0; d < D; d += kLanes) {
        const Vec rounded = (load(row + d) / *scale + shift) - shift;
        const BVec b = __builtin_convertvector(__builtin_convertvector(rounded, IVec), BVec);
        memcpy(codes + d, &b, sizeof b);
    }
}

// Writes one vector into its slot of one layer's KV memory, rounded or quantised. `layer` is where the layer's memory begins (in
// block 0), slot is block * block_size + offset; side is 0 for a key, 1 for a value. Of `a`, strides and block size are read.
template <class T, int D>
static inline void store_kv_row(void* layer, const AttentionArgs& a, int64_t slot, int kv_head, int side, const float* row) {
    const int64_t block = slot / a.block_size, offset = slot % a.block_size;
    T* head = static_cast<T*>(layer) + block * a.kv_block + side * a.kv_side + kv_head * a.kv_head;
    if constexpr (std::is_same_v<T, Int8>) {
        quantize_row<D>(row, head + offset * D, const_cast<float*>(row_scale<D>(head, a.block_size, offset)));
    } else {
        for (int d = 0; d < D; d += kLanes) store(head + offset * a.kv_token + d, load(row + d));
    }
}

// Stores one step's keys and values as they are, or quantised.
template <int D>
static inline void write_rows(const WriteArgs& w) {
    AttentionArgs strides = {};
    strides.kv_block = w.kv_block;
    strides.kv_side = w.kv_side;
    strides.kv_head = w.kv_head;
    strides.block_size = int32_t(w.block_size);
    for (int64_t t = 0; t < w.tokens; t++) {
        const int64_t block = w.slots[t] / w.block_size, offset = w.slots[t] % w.block_size;
        char* to = w.kv + (block * w.kv_block + offset * w.kv_token) * w.size;
        for (int64_t h = 0; h < w.kv_heads; h++) {
            const char* k = w.k + (t * w.k_token + h * w.k_head) * w.size;
            const char* v = w.v + (t * w.v_token + h * w.v_head) * w.size;
            if (w.dtype == kInt8) {
                store_kv_row<Int8, D>(w.kv, strides, w.slots[t], int(h), 0, reinterpret_cast<const float*>(k));
                store_kv_row<Int8, D>(w.kv, strides, w.slots[t], int(h), 1, reinterpret_cast<const float*>(v));
            } else {
                memcpy(to + h * w.kv_head * w.size, k, D * w.size);
                memcpy(to + (w.kv_side + h * w.kv_head) * w.size, v, D * w.size);
            }
        }
    }
}

}  // namespace turnkeep

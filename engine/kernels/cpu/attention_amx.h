// The many-rows tile on Intel AMX: bfloat16 products in 16 x 16 tiles of float32. Only compiled where the machine has AMX.
#pragma once
#include "attention.h"
#include "tiles.h"

#ifdef TURNKEEP_AMX
namespace turnkeep {

// 16 x 16 transpose of 32-bit elements.
static inline void transpose16(const __m512i* in, __m512i* out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i x = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88), y = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        const __m512i z = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88), w = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
        out[i] = _mm512_shuffle_i32x4(x, z, 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(x, z, 0xdd);
        out[i + 4] = _mm512_shuffle_i32x4(y, w, 0x88);
        out[i + 12] = _mm512_shuffle_i32x4(y, w, 0xdd);
    }
}

// 2^x for x <= 0 to a relative error of 1e-4: more than the bfloat16 that it is rounded to can hold.
static inline __m512 exp2_coarse(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, 0x00);  // x - round(x), in [-0.5, 0.5]
    const __m512 n = _mm512_sub_ps(x, r);
    __m512 p = _mm512_set1_ps(0.0555041f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2402265f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931472f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

template <int D>
static void tile_amx(const AttentionArgs& a, const Tile& t, Rows& state) {
    static_assert(D % 32 == 0, "an AMX tile takes 32 dims at a time");
    alignas(64) uint16_t query[kMaxRows * D];
    alignas(64) uint16_t keys_t[kChunk * D];   // per 16 keys, per 32 dims: [dim pair 16][key 16][2]
    alignas(64) uint16_t values[kChunk * D];   // per 32 keys, per 16 dims: [key pair 16][dim 16][2]
    alignas(64) float scores[32 * kChunk];
    alignas(64) uint16_t probabilities[32 * kChunk];
    alignas(64) float product[32 * 32];
    const int rows = t.rows, padded_rows = (rows + 31) / 32 * 32;
    tile_shape().set(16, 16);
    const float scale2 = a.scale * 1.44269504088896341f;  // scores in units of log2, so that exp is exp2

    for (int r = 0; r < padded_rows; r++)
        memcpy(query + r * D, query_row<BFloat16>(a, t, t.row + std::min(r, rows - 1)), D * 2);
    // state.maximum is kept in natural units between tiles; within this function in log2 units
    for (int r = 0; r < rows; r++)
        if (state.maximum[r] > kNegative) state.maximum[r] *= 1.44269504088896341f;

    for (int begin = t.key_begin; begin < t.key_end; begin += kChunk) {
        const int keys = std::min(kChunk, t.key_end - begin);
        const int padded = (keys + 31) / 32 * 32;
        for (int k = 0; k < padded; k += 16) {
            for (int d = 0; d < D; d += 32) {
                __m512i in[16], out[16];
                for (int j = 0; j < 16; j++)
                    in[j] = _mm512_loadu_si512(key_row<BFloat16>(a, t, begin + std::min(k + j, keys - 1), 0) + d);
                transpose16(in, out);
                uint16_t* to = keys_t + (k * D + d * 16);
                for (int j = 0; j < 16; j++) _mm512_store_si512(to + j * 32, out[j]);
            }
        }
        for (int k = 0; k < padded; k += 32) {
            for (int j = 0; j < 32; j += 2) {
                const BFloat16* even = key_row<BFloat16>(a, t, begin + std::min(k + j, keys - 1), 1);
                const BFloat16* odd = key_row<BFloat16>(a, t, begin + std::min(k + j + 1, keys - 1), 1);
                for (int d = 0; d < D; d += 16) {
                    const __m512i e = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + d)));
                    const __m512i o = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + d)));
                    _mm512_store_si512(values + k * D + d * 32 + j * 16, _mm512_or_si512(e, _mm512_slli_epi32(o, 16)));
                }
            }
        }
        for (int r = 0; r < padded_rows; r += 32) {
            // the last row of the 32 sees furthest; chunks that begin behind it are skipped
            const int live = std::min(32, rows - r);
            const Visible furthest = visible(a, t, t.row + r + live - 1);
            const Visible nearest = visible(a, t, t.row + r);
            if (furthest.last < begin || nearest.first >= begin + keys) continue;
            const int seen = std::min(padded, (furthest.last - begin + 32) / 32 * 32);
            for (int k = 0; k < seen; k += 32) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int d = 0; d < D; d += 32) {
                    _tile_loadd(4, query + r * D + d, D * 2);
                    _tile_loadd(5, query + (r + 16) * D + d, D * 2);
                    _tile_loadd(6, keys_t + (k * D + d * 16), 64);
                    _tile_loadd(7, keys_t + ((k + 16) * D + d * 16), 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                _tile_stored(0, scores + k, kChunk * 4);
                _tile_stored(1, scores + k + 16, kChunk * 4);
                _tile_stored(2, scores + 16 * kChunk + k, kChunk * 4);
                _tile_stored(3, scores + 16 * kChunk + k + 16, kChunk * 4);
            }
            for (int i = 0; i < live; i++) {
                const Visible v = visible(a, t, t.row + r + i);
                const int first = v.first - begin, last = std::min(v.last - begin, keys - 1);
                float* s = scores + i * kChunk;
                uint16_t* p = probabilities + i * kChunk;
                if (last < 0 || first >= keys) {
                    memset(p, 0, seen * 2);
                    continue;
                }
                const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
                __m512 top = _mm512_set1_ps(kNegative);
                for (int k = 0; k < seen; k += 16) {
                    __m512 x = _mm512_mul_ps(_mm512_load_ps(s + k), _mm512_set1_ps(scale2));
                    if (k < first || k + 15 > last) {
                        const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(k));
                        const __mmask16 seen_lanes = _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(first)) &
                                                     _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(last));
                        x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen_lanes, x);
                    }
                    _mm512_store_ps(s + k, x);
                    top = _mm512_max_ps(top, x);
                }
                const float maximum = std::max(state.maximum[r + i], _mm512_reduce_max_ps(top));
                const __m512 shift = _mm512_set1_ps(maximum);
                __m512 total = _mm512_setzero_ps();
                for (int k = 0; k < seen; k += 16) {
                    const __m512 e = exp2_coarse(_mm512_max_ps(_mm512_sub_ps(_mm512_load_ps(s + k), shift), _mm512_set1_ps(-1000)));
                    total = _mm512_add_ps(total, e);
                    _mm256_store_si256(reinterpret_cast<__m256i*>(p + k), (__m256i)_mm512_cvtneps_pbh(e));
                }
                const float shrink = maximum == state.maximum[r + i] ? 1.0f : std::exp2(state.maximum[r + i] - maximum);
                state.sum[r + i] = state.sum[r + i] * shrink + _mm512_reduce_add_ps(total);
                state.maximum[r + i] = maximum;
                if (shrink != 1.0f) {
                    float* acc = state.acc + (r + i) * D;
                    for (int d = 0; d < D; d += 16) _mm512_store_ps(acc + d, _mm512_mul_ps(_mm512_load_ps(acc + d), _mm512_set1_ps(shrink)));
                }
            }
            for (int d = 0; d < D; d += 32) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int k = 0; k < seen; k += 32) {
                    _tile_loadd(4, probabilities + k, kChunk * 2);
                    _tile_loadd(5, probabilities + 16 * kChunk + k, kChunk * 2);
                    _tile_loadd(6, values + k * D + d * 32, 64);
                    _tile_loadd(7, values + k * D + (d + 16) * 32, 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                _tile_stored(0, product, 128);
                _tile_stored(1, product + 16, 128);
                _tile_stored(2, product + 512, 128);
                _tile_stored(3, product + 528, 128);
                for (int i = 0; i < live; i++) {
                    float* acc = state.acc + (r + i) * D + d;
                    _mm512_store_ps(acc, _mm512_add_ps(_mm512_load_ps(acc), _mm512_load_ps(product + i * 32)));
                    _mm512_store_ps(acc + 16, _mm512_add_ps(_mm512_load_ps(acc + 16), _mm512_load_ps(product + i * 32 + 16)));
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        if (state.maximum[r] > kNegative) state.maximum[r] *= 0.69314718055994531f;
}

}  // namespace turnkeep
#endif

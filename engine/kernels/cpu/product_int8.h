// Products of unsigned codes with signed activations, four at a time (AVX512-VNNI). Activations have 8 bits (kInt8Rows), or 16 as two
// bytes (kInt16Rows): two products instead of one, and as good as float activations; where memory is the limit they are free.
#pragma once
#include "operand.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>

namespace turnkeep {

// One step of 4 inputs: acc += (a, b) * x, for M rows. Accumulators are named by constants only, so that they stay in registers.
template <int M>
static inline __attribute__((always_inline)) void dot_step(__m512i a, __m512i b, const char* x, int64_t stride, __m512i (&acc)[M][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        int32_t four;
        memcpy(&four, x + r * stride, 4);
        const __m512i value = _mm512_set1_epi32(four);
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], a, value);
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], b, value);
    }
}

template <int M>
static inline __attribute__((always_inline)) void clear(__m512i (&acc)[M][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) acc[r][0] = acc[r][1] = _mm512_setzero_si512();
}

template <int M>
static inline __attribute__((always_inline)) void keep(const __m512i (&acc)[M][2], __m512i* out) {
#pragma GCC unroll 12
    for (int r = 0; r < M; r++) {
        out[r * 2] = acc[r][0];
        out[r * 2 + 1] = acc[r][1];
    }
}

// Codes of 8 bits, activations of 16: both bytes against the same weights, `steps` steps of 4 inputs. high, low: [M][2]. A function of
// its own, not inlined: the compiler then keeps all accumulators in registers.
template <int M>
static __attribute__((noinline)) void dot_run_wide(const char* left, const char* right, const char* x, const char* x_low, int64_t stride, int64_t steps,
                                                   __m512i* high_out, __m512i* low_out) {
    __m512i high[M][2], low[M][2];
    clear<M>(high);
    clear<M>(low);
#pragma GCC unroll 4
    for (int64_t s = 0; s < steps; s++, left += 64, right += 64, x += 4, x_low += 4) {
        _mm_prefetch(left + kAhead, _MM_HINT_T0);
        _mm_prefetch(right + kAhead, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
        dot_step<M>(a, b, x, stride, high);
        dot_step<M>(a, b, x_low, stride, low);
    }
    keep<M>(high, high_out);
    keep<M>(low, low_out);
}

// One group of 32 codes of 4 bits.
template <int M>
static __attribute__((noinline)) void dot_nibbles_wide(const char* left, const char* right, const char* x, const char* x_low, int64_t stride,
                                                       __m512i* high_out, __m512i* low_out) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    __m512i high[M][2], low[M][2];
    clear<M>(high);
    clear<M>(low);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++, left += 64, right += 64, x += 4, x_low += 4) {
        _mm_prefetch(left + kAhead, _MM_HINT_T0);
        _mm_prefetch(right + kAhead, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
        const __m512i a_low = _mm512_and_si512(a, mask), b_low = _mm512_and_si512(b, mask);
        dot_step<M>(a_low, b_low, x, stride, high);
        dot_step<M>(a_low, b_low, x_low, stride, low);
        const __m512i a_high = _mm512_and_si512(_mm512_srli_epi16(a, 4), mask), b_high = _mm512_and_si512(_mm512_srli_epi16(b, 4), mask);
        dot_step<M>(a_high, b_high, x + 16, stride, high);
        dot_step<M>(a_high, b_high, x_low + 16, stride, low);
    }
    keep<M>(high, high_out);
    keep<M>(low, low_out);
}

// As dot_step for up to 6 rows, `below` being the fourth: addresses are then one register and a multiple of another.
template <int M>
static inline __attribute__((always_inline)) void dot_step_near(__m512i a, __m512i b, const char* x, const char* below, int64_t stride,
                                                                __m512i (&acc)[M][2]) {
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) {
        int32_t four;
        memcpy(&four, (r < 3 ? x : below) + r % 3 * stride, 4);
        const __m512i value = _mm512_set1_epi32(four);
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], a, value);
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], b, value);
    }
}

// Up to 6 rows: then sums of a group and of all groups both fit into registers. The 128 in every code is taken off at the end, for all
// groups at once.
template <int M>
static __attribute__((noinline)) void int8_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c, Ahead ahead) {
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const char *from = x.data + row * x.stride, *below = from + 3 * x.stride;
    const int64_t groups = x.padded / kScaleGroup, stride = x.stride, part = ahead.bytes / groups;
    const float* scales = x.scale + row * groups;
    __m512 total[M][2];
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        ask_for_part(ahead, part);
        __m512i acc[M][2];
        clear<M>(acc);
        for (int s = 0; s < kScaleGroup / 16; s++) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, left += 64, right += 64, from += 4, below += 4) {
                _mm_prefetch(left + kAhead, _MM_HINT_T0);
                _mm_prefetch(right + kAhead, _MM_HINT_T0);
                const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
                dot_step_near<M>(a, b, from, below, stride, acc);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < M; r++) {
            const __m512 scale = _mm512_set1_ps(scales[r * groups + g]);
            total[r][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][0]), scale, total[r][0]);
            total[r][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][1]), scale, total[r][1]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) {
        const __m512 zero = _mm512_set1_ps(x.zero[row + r]);
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++)
            _mm512_storeu_ps(c + r * kBlock + p * kPanel,
                             _mm512_mul_ps(_mm512_sub_ps(total[r][p], zero), _mm512_loadu_ps(w.scale + block * kBlock + p * kPanel)));
    }
}

template <int M>
static void int16_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    __m512i high[M * 2], low[M * 2];
    dot_run_wide<M>(panel_of(w, block * 2), panel_of(w, block * 2 + 1), x.data + row * x.stride, x.low + row * x.stride,
                    x.stride, x.padded / 4,
                    high, low);
    for (int r = 0; r < M; r++) {
        const __m512i zero = _mm512_set1_epi32(128 * x.sums[row + r]), low_zero = _mm512_set1_epi32(128 * x.low_sums[row + r]);
        for (int p = 0; p < 2; p++) {
            const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(high[r * 2 + p], zero));
            const __m512 lower = _mm512_cvtepi32_ps(_mm512_sub_epi32(low[r * 2 + p], low_zero));
            const __m512 value = _mm512_fmadd_ps(upper, _mm512_set1_ps(256.0f), lower);
            const __m512 scale = _mm512_mul_ps(_mm512_loadu_ps(w.scale + block * kBlock + p * kPanel), _mm512_set1_ps(x.scale[row + r]));
            _mm512_storeu_ps(c + r * kBlock + p * kPanel, _mm512_mul_ps(value, scale));
        }
    }
}

static inline __m512 half_row(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// Grouped codes: c = sum over groups of scale_g * (codes . x) + minimum_g * sum(x), with activations of 16 bits.
template <int M, int Bits>
static void group_rows_wide(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    constexpr int64_t kCodes = kGroup * kPanel * Bits / 8;
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const char *upper = x.data + row * x.stride, *lower = x.low + row * x.stride;
    const int64_t groups = x.padded / kGroup;
    alignas(64) float total[M][2][16];
    __m512i high[M * 2], low[M * 2];
    for (int64_t g = 0; g < groups; g++) {
        const char *x_high = upper + g * kGroup, *x_low = lower + g * kGroup;
        if constexpr (Bits == 8)
            dot_run_wide<M>(left, right, x_high, x_low, x.stride, kGroup / 4, high, low);
        else
            dot_nibbles_wide<M>(left, right, x_high, x_low, x.stride, high, low);
        const __m512 scale[2] = {half_row(left + kCodes), half_row(right + kCodes)};
        const __m512 minimum[2] = {half_row(left + kCodes + 32), half_row(right + kCodes + 32)};
        for (int r = 0; r < M; r++) {
            const float own = x.scale[row + r];
            const float sum = float(x.sums[(row + r) * groups + g]) * 256.0f + float(x.low_sums[(row + r) * groups + g]);
            const __m512 factor = _mm512_set1_ps(own), shift = _mm512_set1_ps(sum * own);
            for (int p = 0; p < 2; p++) {
                const __m512 value =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r * 2 + p]), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low[r * 2 + p]));
                const __m512 before = g ? _mm512_load_ps(total[r][p]) : _mm512_setzero_ps();
                const __m512 with_minimum = _mm512_fmadd_ps(minimum[p], shift, before);
                _mm512_store_ps(total[r][p], _mm512_fmadd_ps(_mm512_mul_ps(value, factor), scale[p], with_minimum));
            }
        }
        left += kCodes + 4 * kPanel;
        right += kCodes + 4 * kPanel;
    }
    for (int r = 0; r < M; r++)
        for (int p = 0; p < 2; p++) _mm512_storeu_ps(c + r * kBlock + p * kPanel, _mm512_load_ps(total[r][p]));
}

// Grouped codes with activations of 8 bits, up to 6 rows: as int8_rows, but for a scale and a minimum for every column and group.
template <int M, int Bits>
static __attribute__((noinline)) void group_rows_near(const Matrix& w, const Operand& x, int row, int64_t block, float* c, Ahead ahead) {
    constexpr int64_t kCodes = kGroup * kPanel * Bits / 8;
    const char *left = panel_of(w, block * 2), *right = panel_of(w, block * 2 + 1);
    const char *from = x.data + row * x.stride, *below = from + 3 * x.stride;
    const int64_t groups = x.padded / kGroup, scales = (x.padded + kScaleGroup - 1) / kScaleGroup, stride = x.stride;
    const int64_t part = ahead.bytes / groups;
    const float* own_scales = x.scale + row * scales;
    const int32_t* own_sums = x.sums + row * groups;
    const __m512i mask = _mm512_set1_epi8(0x0f);
    __m512 total[M][2];
#pragma GCC unroll 6
    for (int r = 0; r < M; r++) total[r][0] = total[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        ask_for_part(ahead, part);
        __m512i acc[M][2];
        clear<M>(acc);
        if constexpr (Bits == 8) {
            for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
                for (int s = 0; s < 4; s++, left += 64, right += 64, from += 4, below += 4) {
                    _mm_prefetch(left + kAhead, _MM_HINT_T0);
                    _mm_prefetch(right + kAhead, _MM_HINT_T0);
                    dot_step_near<M>(_mm512_loadu_si512(left), _mm512_loadu_si512(right), from, below, stride, acc);
                }
            }
        } else {
            for (int half = 0; half < 2; half++) {
#pragma GCC unroll 2
                for (int s = 0; s < 2; s++, left += 64, right += 64, from += 4, below += 4) {
                    _mm_prefetch(left + kAhead, _MM_HINT_T0);
                    _mm_prefetch(right + kAhead, _MM_HINT_T0);
                    const __m512i a = _mm512_loadu_si512(left), b = _mm512_loadu_si512(right);
                    dot_step_near<M>(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask), from, below, stride, acc);
                    dot_step_near<M>(_mm512_and_si512(_mm512_srli_epi16(a, 4), mask), _mm512_and_si512(_mm512_srli_epi16(b, 4), mask),
                                     from + 16, below + 16, stride, acc);
                }
            }
            from += 16;
            below += 16;
        }
        const __m512 scale[2] = {half_row(left), half_row(right)}, minimum[2] = {half_row(left + 32), half_row(right + 32)};
        left += 4 * kPanel;
        right += 4 * kPanel;
#pragma GCC unroll 6
        for (int r = 0; r < M; r++) {
            const float own = own_scales[r * scales + g / 2];
            const __m512 factor = _mm512_set1_ps(own), shift = _mm512_set1_ps(own * float(own_sums[r * groups + g]));
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) {
                total[r][p] = _mm512_fmadd_ps(minimum[p], shift, total[r][p]);
                total[r][p] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][p]), factor), scale[p], total[r][p]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < M; r++)
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) _mm512_storeu_ps(c + r * kBlock + p * kPanel, total[r][p]);
}

template <int M>
static void tile_int8_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c, Ahead ahead) {
    constexpr int kParts = M > 6 ? 2 : 1, kRows = M / kParts;
    for (int r = 0; r < M; r += kRows) {
        float* to = c + r * kBlock;
        const Ahead part = {ahead.at + r / kRows * (ahead.bytes / kParts), ahead.bytes / kParts};
        if (w.format == kCodes8)
            int8_rows<kRows>(w, x, row + r, block, to, part);
        else if (w.format == kCodes8Groups)
            group_rows_near<kRows, 8>(w, x, row + r, block, to, part);
        else
            group_rows_near<kRows, 4>(w, x, row + r, block, to, part);
    }
}

template <int M>
static void tile_int16_rows(const Matrix& w, const Operand& x, int row, int64_t block, float* c) {
    if (w.format == kCodes8) return int16_rows<M>(w, x, row, block, c);
    if (w.format == kCodes8Groups) return group_rows_wide<M, 8>(w, x, row, block, c);
    return group_rows_wide<M, 4>(w, x, row, block, c);
}

static void tile_int8(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c, Ahead ahead) {
    switch (rows) {
        case 1: return tile_int8_rows<1>(w, x, row, block, c, ahead);
        case 2: return tile_int8_rows<2>(w, x, row, block, c, ahead);
        case 4: return tile_int8_rows<4>(w, x, row, block, c, ahead);
        case 8: return tile_int8_rows<8>(w, x, row, block, c, ahead);
        default: return tile_int8_rows<12>(w, x, row, block, c, ahead);
    }
}

static void tile_int16(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c) {
    switch (rows) {
        case 1: return tile_int16_rows<1>(w, x, row, block, c);
        case 2: return tile_int16_rows<2>(w, x, row, block, c);
        default: return tile_int16_rows<4>(w, x, row, block, c);
    }
}

}  // namespace turnkeep
#endif

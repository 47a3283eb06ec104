// Products in float32 multiply-adds, for every format and on any machine: weights are widened in registers. A row's sum runs over the
// inputs in order, whatever rows stand beside it.
#pragma once
#include "operand.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace turnkeep {

// Panels that one tile accumulates at once: what the registers hold.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kFmaPanels = 2;
#else
constexpr int kFmaPanels = 1;
#endif

struct LoadF32 {
    static constexpr int kBits = 32;
    static constexpr int kStep = 1;
    static inline void load_step(const char* panel, int64_t k, Vec* out) { out[0] = load(reinterpret_cast<const float*>(panel) + k * kPanel); }
};

struct LoadBF16 {
    static constexpr int kBits = 16;
    static constexpr int kStep = 2;
    static inline void load_step(const char* panel, int64_t k, Vec* out) {
        UVec u;
        memcpy(&u, panel + k * kPanel * 2, sizeof u);
        const UVec even = u << 16, odd = u & 0xffff0000u;
        memcpy(out, &even, sizeof even);
        memcpy(out + 1, &odd, sizeof odd);
    }
};

struct LoadF16 {
    static constexpr int kBits = 16;
    static constexpr int kStep = 2;
    static inline void load_step(const char* panel, int64_t k, Vec* out) {
        UVec u;
        memcpy(&u, panel + k * kPanel * 2, sizeof u);
        const HVec even = __builtin_convertvector(u & 0xffffu, HVec), odd = __builtin_convertvector(u >> 16, HVec);
        FVec half;
        memcpy(&half, &even, sizeof half);
        out[0] = __builtin_convertvector(half, Vec);
        memcpy(&half, &odd, sizeof half);
        out[1] = __builtin_convertvector(half, Vec);
    }
};

static inline void widen_codes(UVec u, Vec* out) {
    for (int i = 0; i < 4; i++) {
        const IVec code = (IVec)((u >> (8 * i)) & 0xffu);
        out[i] = __builtin_convertvector(code, Vec);
    }
}

struct LoadInt8 {
    static constexpr int kBits = 8;
    static constexpr int kStep = 4;
    static inline void load_step(const char* panel, int64_t k, Vec* out) {
        UVec u;
        memcpy(&u, panel + k * kPanel, sizeof u);
        widen_codes(u, out);
        for (int i = 0; i < 4; i++) out[i] -= 128.0f;
    }
};

// One group of a grouped format: panel points at it, k counts within it.
struct LoadInt8Group {
    static constexpr int kBits = 8;
    static constexpr int kStep = 4;
    static constexpr int64_t kCodes = kGroup * kPanel;
    static inline void load_step(const char* panel, int64_t k, Vec* out) {
        UVec u;
        memcpy(&u, panel + k * kPanel, sizeof u);
        widen_codes(u, out);
    }
};

struct LoadInt4Group {
    static constexpr int kBits = 4;
    static constexpr int kStep = 4;
    static constexpr int64_t kCodes = kGroup * kPanel / 2;
    static inline void load_step(const char* panel, int64_t k, Vec* out) {
        UVec u;
        memcpy(&u, panel + k % 16 * kPanel, sizeof u);
        widen_codes((k < 16 ? u : u >> 4) & 0x0f0f0f0fu, out);
    }
};

template <int M, int P, class W>
static inline __attribute__((always_inline)) void fma_run(const char* const* panel, const float* x, int64_t stride, int64_t inputs, Vec (&acc)[M][P]) {
    for (int64_t k = 0; k < inputs; k += W::kStep) {
        Vec w[P][W::kStep];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            __builtin_prefetch(panel[p] + k * W::kBits * kPanel / 8 + kAhead);
            W::load_step(panel[p], k, w[p]);
        }
#pragma GCC unroll 4
        for (int s = 0; s < W::kStep; s++)
#pragma GCC unroll 12
            for (int r = 0; r < M; r++) {
                const Vec value = splat(x[r * stride + k + s]);
#pragma GCC unroll 2
                for (int p = 0; p < P; p++) acc[r][p] += value * w[p][s];
            }
    }
}

template <int M, int P, class W>
static inline void fma_plain(const Matrix& w, const float* x, int64_t stride, int64_t first_panel, float* c) {
    const char* panel[P];
    for (int p = 0; p < P; p++) panel[p] = panel_of(w, first_panel + p);
    Vec acc[M][P];
#pragma GCC unroll 12
    for (int r = 0; r < M; r++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) acc[r][p] = splat(0.0f);
    fma_run<M, P, W>(panel, x, stride, w.k, acc);
#pragma GCC unroll 12
    for (int r = 0; r < M; r++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            if (w.format == kCodes8) acc[r][p] *= load(w.scale + (first_panel + p) * kPanel);
            store(c + r * kBlock + p * kPanel, acc[r][p]);
        }
}

template <int M, int P, class W>
static inline void fma_groups(const Matrix& w, const float* x, int64_t stride, int64_t first_panel, float* c) {
    const char* panel[P];
    for (int p = 0; p < P; p++) panel[p] = panel_of(w, first_panel + p);
    for (int r = 0; r < M; r++)
        for (int p = 0; p < P; p++) store(c + r * kBlock + p * kPanel, splat(0.0f));
    for (int64_t g = 0; g < w.k / kGroup; g++, x += kGroup) {
        Vec acc[M][P];
#pragma GCC unroll 12
        for (int r = 0; r < M; r++)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) acc[r][p] = splat(0.0f);
        fma_run<M, P, W>(panel, x, stride, kGroup, acc);
        for (int r = 0; r < M; r++) {
            float sum = 0;
            for (int i = 0; i < kGroup; i++) sum += x[r * stride + i];
            for (int p = 0; p < P; p++) {
                const Float16* scale = reinterpret_cast<const Float16*>(panel[p] + W::kCodes);
                float* to = c + r * kBlock + p * kPanel;
                store(to, load(to) + acc[r][p] * load(scale) + splat(sum) * load(scale + kPanel));
            }
        }
        for (int p = 0; p < P; p++) panel[p] += W::kCodes + 4 * kPanel;
    }
}

#if defined(__AVX512F__)
// float16 as it lies: a vector of 8 columns times (even, odd) input, the two of x beside it; the pairs are added at the end.
template <int M, int P>
static __attribute__((noinline)) void fma_halves(const Matrix& w, const float* x, int64_t stride, int64_t first_panel, float* c) {
    const char* panel[P];
    for (int p = 0; p < P; p++) panel[p] = panel_of(w, first_panel + p);
    __m512 acc[M][P][2];
#pragma GCC unroll 12
    for (int r = 0; r < M; r++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) acc[r][p][0] = acc[r][p][1] = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int64_t k = 0; k < w.k; k += 2) {
        __m512 low[P], high[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            const char* from = panel[p] + k * kPanel * 2;
            _mm_prefetch(from + kAhead, _MM_HINT_T0);
            low[p] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
            high[p] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32)));
        }
#pragma GCC unroll 12
        for (int r = 0; r < M; r++) {
            double pair;
            memcpy(&pair, x + r * stride + k, 8);
            const __m512 value = _mm512_castpd_ps(_mm512_set1_pd(pair));
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                acc[r][p][0] = _mm512_fmadd_ps(low[p], value, acc[r][p][0]);
                acc[r][p][1] = _mm512_fmadd_ps(high[p], value, acc[r][p][1]);
            }
        }
    }
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
#pragma GCC unroll 12
    for (int r = 0; r < M; r++)
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            const __m512 a = acc[r][p][0], b = acc[r][p][1];
            const __m512 sum = _mm512_add_ps(_mm512_permutex2var_ps(a, evens, b), _mm512_permutex2var_ps(a, odds, b));
            _mm512_storeu_ps(c + r * kBlock + p * kPanel, sum);
        }
}
#endif

template <int M>
static void tile_fma_rows(const Matrix& w, const float* x, int64_t stride, int64_t block, float* c) {
#if defined(__AVX512F__)
    if (w.format == kF16) {
        constexpr int kWide = M <= 4 ? 2 : 1;
        for (int p = 0; p < 2; p += kWide) fma_halves<M, kWide>(w, x, stride, block * 2 + p, c + p * kPanel);
        return;
    }
#endif
    for (int p = 0; p < 2; p += kFmaPanels) {
        const int64_t first = block * 2 + p;
        float* to = c + p * kPanel;
        switch (w.format) {
            case kF32: fma_plain<M, kFmaPanels, LoadF32>(w, x, stride, first, to); break;
            case kBF16: fma_plain<M, kFmaPanels, LoadBF16>(w, x, stride, first, to); break;
            case kF16: fma_plain<M, kFmaPanels, LoadF16>(w, x, stride, first, to); break;
            case kCodes8: fma_plain<M, kFmaPanels, LoadInt8>(w, x, stride, first, to); break;
            case kCodes8Groups: fma_groups<M, kFmaPanels, LoadInt8Group>(w, x, stride, first, to); break;
            default: fma_groups<M, kFmaPanels, LoadInt4Group>(w, x, stride, first, to); break;
        }
    }
}

// Rows [row, row + rows) of x, a tile of the operand, times a block of W: c [rows][32].
static void tile_fma(const Matrix& w, const Operand& x, int row, int rows, int64_t block, float* c) {
    const float* from = reinterpret_cast<const float*>(x.data + row * x.stride);
    const int64_t stride = x.stride / 4;
    switch (rows) {
        case 1: return tile_fma_rows<1>(w, from, stride, block, c);
        case 2: return tile_fma_rows<2>(w, from, stride, block, c);
        case 4: return tile_fma_rows<4>(w, from, stride, block, c);
        case 8: return tile_fma_rows<8>(w, from, stride, block, c);
        default: return tile_fma_rows<12>(w, from, stride, block, c);
    }
}

}  // namespace turnkeep

// Sixteen floats at a time, in GCC's vector extension: the same source serves AVX-512, AVX2 and NEON; the compiler splits what the
// machine cannot hold in one register. Storage types (float, bfloat16, float16) are widened on load and narrowed on store.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace turnkeep {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef uint32_t UVec __attribute__((vector_size(64)));
typedef uint16_t HVec __attribute__((vector_size(32)));
typedef _Float16 FVec __attribute__((vector_size(32)));
typedef int8_t BVec __attribute__((vector_size(16)));

struct BFloat16 {
    uint16_t bits;
};
typedef _Float16 Float16;

// A code of symmetrical quantisation: its vector's scale, kept elsewhere, multiplies it.
struct Int8 {
    int8_t code;
};

static inline Vec splat(float x) { return x - (Vec){}; }

static inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Vec load(const BFloat16* p) {
    HVec h;
    memcpy(&h, p, sizeof h);
    UVec u = __builtin_convertvector(h, UVec) << 16;
    Vec v;
    memcpy(&v, &u, sizeof v);
    return v;
}

static inline Vec load(const Float16* p) {
#ifdef __AVX512F__  // GCC 12 would convert one by one
    return Vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX2__)
    __m256 halves[2];
    for (int i = 0; i < 2; i++) halves[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i)));
    Vec v;
    memcpy(&v, halves, sizeof v);
    return v;
#else
    FVec h;
    memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, Vec);
#endif
}

static inline Vec load(const Int8* p) {
#ifdef __AVX512F__  // GCC 12 would convert one by one
    return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
    __m256 halves[2];
    for (int i = 0; i < 2; i++)
        halves[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))));
    Vec v;
    memcpy(&v, halves, sizeof v);
    return v;
#else
    BVec b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, IVec), Vec);
#endif
}

static inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// Round to nearest even, as torch does; NaN stays NaN because its payload bits survive the addition only when quiet, which
// arithmetic results are.
static inline HVec to_bf16(Vec v) {
    UVec u;
    memcpy(&u, &v, sizeof u);
    u = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return __builtin_convertvector(u, HVec);
}

static inline void store(BFloat16* p, Vec v) {
    HVec h = to_bf16(v);
    memcpy(p, &h, sizeof h);
}

static inline void store(Float16* p, Vec v) {
#ifdef __AVX512F__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(__m512(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    FVec h = __builtin_convertvector(v, FVec);
    memcpy(p, &h, sizeof h);
#endif
}

static inline float max_lane(Vec v) {
    float m = v[0];
    for (int i = 1; i < kLanes; i++) m = v[i] > m ? v[i] : m;
    return m;
}

static inline float sum_lanes(Vec v) {
    float s = 0;
    for (int i = 0; i < kLanes; i++) s += v[i];
    return s;
}

static inline Vec vabs(Vec v) {
    IVec bits;
    memcpy(&bits, &v, sizeof bits);
    bits &= 0x7fffffff;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static inline Vec vmax(Vec a, Vec b) { return a > b ? a : b; }

// e^x for x <= 0, relative error below 2e-7; anything under -87 gives 0 (so minus infinity, a masked score, does too).
// Cephes' expf: range reduction by ln 2 in two parts, then a polynomial of degree 5.
static inline Vec exp_nonpositive(Vec x) {
    const IVec dead = x < splat(-87.0f);
    x = dead ? splat(0.0f) : x;
    const Vec scaled = x * 1.44269504088896341f - 0.5f;
    const IVec n = __builtin_convertvector(scaled, IVec);  // truncates towards zero: round to nearest for x <= 0
    const Vec nf = __builtin_convertvector(n, Vec);
    Vec r = x - nf * 0.693359375f;
    r = r - nf * -2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    IVec bits = (n + 127) << 23;
    Vec two_n;
    memcpy(&two_n, &bits, sizeof two_n);
    p = p * two_n;
    return dead ? splat(0.0f) : p;
}

// 2^x for x <= 0 (and a little above), relative error below 2e-7; under -126 it gives 0. Cephes' exp2f.
static inline Vec exp2_nonpositive(Vec x) {
    const IVec dead = x < splat(-126.0f);
    x = dead ? splat(0.0f) : x;
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec whole = (x + shift) - shift, r = x - whole;
    Vec p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    const IVec bits = (__builtin_convertvector(whole, IVec) + 127) << 23;
    Vec two_n;
    memcpy(&two_n, &bits, sizeof two_n);
    p = p * two_n;
    return dead ? splat(0.0f) : p;
}

// Sixteen vectors -> one vector whose lane i is the sum of vector i. Four halving rounds of shuffles and adds.
#if defined(__AVX2__) && !defined(__AVX512F__)
// Sixteen-lane shuffles would be taken apart lane by lane here.
static __attribute__((noinline)) Vec sum_each(const Vec* rows) {
    __m256 sums[2];
    for (int h = 0; h < 2; h++) {
        __m256 r[8];
        for (int i = 0; i < 8; i++) {
            const float* row = reinterpret_cast<const float*>(rows + 8 * h + i);
            r[i] = _mm256_add_ps(_mm256_load_ps(row), _mm256_load_ps(row + 8));
        }
        const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
        const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
        sums[h] = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    Vec v;
    memcpy(&v, sums, sizeof v);
    return v;
}
#else
static inline Vec sum_each(const Vec* rows) {
    Vec a[8], b[4], c[2];
    const IVec lo1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    const IVec hi1 = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
    for (int i = 0; i < 8; i++) {
        const Vec x = rows[2 * i], y = rows[2 * i + 1];
        a[i] = __builtin_shuffle(x, y, lo1) + __builtin_shuffle(x, y, hi1);
    }
    const IVec lo2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const IVec hi2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    for (int i = 0; i < 4; i++) {
        const Vec x = a[2 * i], y = a[2 * i + 1];
        b[i] = __builtin_shuffle(x, y, lo2) + __builtin_shuffle(x, y, hi2);
    }
    const IVec lo3 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const IVec hi3 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
    for (int i = 0; i < 2; i++) {
        const Vec x = b[2 * i], y = b[2 * i + 1];
        c[i] = __builtin_shuffle(x, y, lo3) + __builtin_shuffle(x, y, hi3);
    }
    const IVec lo4 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const IVec hi4 = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
    return __builtin_shuffle(c[0], c[1], lo4) + __builtin_shuffle(c[0], c[1], hi4);
}
#endif

}  // namespace turnkeep

// The left side of a product: rows of activations in the form that a method of multiplication reads.
//
// Rows are plain. They are a little further apart than they are long, so that rows of 4 KiB do not fall into the same cache set.
#pragma once
#include <cmath>

#include "matrix.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace turnkeep {

enum Kind : int32_t {
    kFloatRows,     // float
    kHalfRows,      // float16, each row scaled by a power of two so that no sum of products overflows
    kBFloatRows,    // bfloat16
    kInt8Rows,      // int8 with a scale for every 64 inputs
    kInt16Rows,     // 16 bits as two int8, high and low, with a scale a row
};

constexpr int kScaleGroup = 64;  // inputs that share a scale in kInt8Rows
constexpr float kTiny = 1e-30f;    // a row whose largest value is below this counts as zero: its inverse would overflow

struct Operand {
    Kind kind;
    int rows;
    int64_t k, padded;   // inputs; inputs with padding
    int64_t stride;      // bytes from row to row
    int sum_group;       // inputs that one of `sums` covers
    char* data;
    char* low;           // kInt16Rows: the low bytes
    float* scale;        // [rows] or [rows][groups of 64]
    float* zero;         // kInt8Rows: [rows], what a code of 128 throughout would give
    int32_t* sums;       // int kinds: [rows][sum groups], sums of codes
    int32_t* low_sums;
};

// Rows of the next tile when `left` are to do; it may be more than that: operands are padded with rows of zeros. (AMX takes any number
// up to 32.) Tiles are 1, 2, 4, 8 or 12 rows, of kInt16Rows up to 4; small ones wait for their sums, so 16 are 8 and 8, not 12 and 4.
static inline int tile_rows(Kind kind, int left) {
    if (kind == kInt16Rows) return left > 2 ? 4 : left;
    if (left >= 12 && (left <= 12 || left > 16)) return 12;
    return left > 4 ? 8 : left > 2 ? 4 : left;
}

constexpr int kPadRows = 7;

static inline int64_t input_bytes(Kind kind) { return kind == kFloatRows ? 4 : kind == kHalfRows || kind == kBFloatRows ? 2 : 1; }

// Memory taken from one arena, 64 bytes aligned.
class Arena {
  public:
    explicit Arena(char* base) : next_(base) {}
    template <class T>
    T* take(int64_t count) {
        T* p = reinterpret_cast<T*>(next_);
        next_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return p;
    }

  private:
    char* next_;
};

static inline int sum_group_of(const Matrix& w, Kind kind) {
    if (w.format != kCodes8) return kGroup;
    return kind == kInt8Rows ? kScaleGroup : int(padded_inputs(w.format, w.k));
}

// Bytes that an operand of `rows` rows takes, at most.
static inline int64_t operand_bytes(int64_t rows, int64_t k) {
    const int64_t padded = (k + 63) / 64 * 64;
    return (rows + kPadRows) * (padded * 4 + 128 + (padded / 32 + 2) * 12 + 4) + 7 * 64;
}

static inline Operand new_operand(Arena& arena, const Matrix& w, Kind kind, int rows) {
    Operand o{};
    o.kind = kind;
    o.rows = rows;
    o.k = w.k;
    o.padded = padded_inputs(w.format, w.k);
    o.sum_group = sum_group_of(w, kind);
    o.stride = (o.padded * input_bytes(kind) + 63) / 64 * 64 + 64;
    const int64_t room = rows + kPadRows;
    o.data = arena.take<char>(room * o.stride);
    memset(o.data + rows * o.stride, 0, kPadRows * o.stride);
    if (kind == kHalfRows) o.scale = arena.take<float>(room);
    if (kind == kInt8Rows || kind == kInt16Rows) {
        const int64_t sums = (o.padded + o.sum_group - 1) / o.sum_group;
        o.scale = arena.take<float>(kind == kInt8Rows ? room * ((o.padded + kScaleGroup - 1) / kScaleGroup) : room);
        o.sums = arena.take<int32_t>(room * sums);
        memset(o.sums + rows * sums, 0, kPadRows * sums * 4);
        o.zero = arena.take<float>(room);
        if (kind == kInt16Rows) {
            o.low = arena.take<char>(room * o.stride);
            memset(o.low + rows * o.stride, 0, kPadRows * o.stride);
            o.low_sums = arena.take<int32_t>(room * sums);
            memset(o.low_sums + rows * sums, 0, kPadRows * sums * 4);
        }
    }
    return o;
}

static inline float max_abs(const float* x, int64_t n) {
    Vec top = splat(0.0f);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        const Vec v = load(x + i);
        top = vmax(top, vmax(v, -v));
    }
    float m = max_lane(top);
    for (; i < n; i++) m = std::max(m, std::fabs(x[i]));
    return m;
}

// 16 floats -> 16 int8 codes of x * inverse, rounded to nearest.
static inline IVec to_codes(Vec x, float inverse) {
    const Vec scaled = x * inverse;
    // adding 1.5 * 2^23 leaves the rounded integer in the mantissa
    const Vec shifted = scaled + 12582912.0f;
    IVec bits;
    memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4b400000;
}


static inline void put_codes(char* to, IVec codes) {
    const BVec bytes = __builtin_convertvector(codes, BVec);
    memcpy(to, &bytes, sizeof bytes);
}

static inline int32_t sum_codes(IVec codes) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)codes);
#else
    int32_t s = 0;
    for (int i = 0; i < kLanes; i++) s += codes[i];
    return s;
#endif
}

static inline void put_half_row(const Operand& o, int row, const float* x) {
    // the largest of the row comes to lie between 8 and 16
    int exponent = 0;
    const float top = max_abs(x, o.k);
    if (top > 0 && std::isfinite(top)) std::frexp(top, &exponent);
    exponent = std::max(-100, std::min(100, exponent));
    const float scale = std::ldexp(1.0f, 4 - exponent);
    o.scale[row] = std::ldexp(1.0f, exponent - 4);
    Float16* to = reinterpret_cast<Float16*>(o.data + row * o.stride);
    for (int64_t d = 0; d < o.k; d += kLanes) store(to + d, load(x + d) * scale);
}

// 8 bits: a scale for every 64 inputs.
static inline void put_int8_row(const Operand& o, int row, const float* x) {
    const int64_t groups = (o.padded + kScaleGroup - 1) / kScaleGroup, sums = (o.padded + o.sum_group - 1) / o.sum_group;
    char* to = o.data + row * o.stride;
    float zero = 0;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t begin = g * kScaleGroup, end = std::min(o.k, begin + kScaleGroup);
        const float top = begin < end ? max_abs(x + begin, end - begin) : 0.0f;
        o.scale[row * groups + g] = top / 127.0f;
        const float inverse = top > kTiny ? 127.0f / top : 0.0f;
        for (int64_t d = begin; d < end;) {
            IVec sum = {};
            const int64_t part = std::min(end, d + o.sum_group), index = d / o.sum_group;
            for (; d < part; d += kLanes) {
                const IVec codes = to_codes(load(x + d), inverse);
                put_codes(to + d, codes);
                sum += codes;
            }
            const int32_t total = sum_codes(sum);
            o.sums[row * sums + index] = total;
            zero += 128.0f * top / 127.0f * float(total);
        }
    }
    o.zero[row] = zero;
    memset(to + o.k, 0, o.padded - o.k);
}

// 16 bits: one scale for the row.
static inline void put_int16_row(const Operand& o, int row, const float* x) {
    const int64_t sums = (o.padded + o.sum_group - 1) / o.sum_group;
    char *to = o.data + row * o.stride, *low = o.low + row * o.stride;
    const float top = max_abs(x, o.k);
    constexpr float kTop = 32512.0f;  // 127 * 256: both bytes stay within int8
    o.scale[row] = top / kTop;
    const float inverse = top > kTiny ? kTop / top : 0.0f;
    for (int64_t d = 0; d < o.k;) {
        IVec sum = {}, low_sum = {};
        const int64_t part = std::min(o.k, d + o.sum_group), index = d / o.sum_group;
        for (; d < part; d += kLanes) {
            const IVec codes = to_codes(load(x + d), inverse);
            const IVec upper = (codes + 128) >> 8, lower = codes - upper * 256;
            put_codes(to + d, upper);
            put_codes(low + d, lower);
            sum += upper;
            low_sum += lower;
        }
        o.sums[row * sums + index] = sum_codes(sum);
        o.low_sums[row * sums + index] = sum_codes(low_sum);
    }
    memset(to + o.k, 0, o.padded - o.k);
    memset(low + o.k, 0, o.padded - o.k);
}

// Converts one row, x [k]; k is a multiple of 16.
static inline void put_row(const Operand& o, int row, const float* x) {
    switch (o.kind) {
        case kFloatRows: memcpy(o.data + row * o.stride, x, o.k * 4); return;
        case kBFloatRows: {
            BFloat16* to = reinterpret_cast<BFloat16*>(o.data + row * o.stride);
            for (int64_t d = 0; d < o.k; d += kLanes) store(to + d, load(x + d));
            return;
        }
        case kHalfRows: return put_half_row(o, row, x);
        case kInt8Rows: return put_int8_row(o, row, x);
        case kInt16Rows: return put_int16_row(o, row, x);
    }
}

}  // namespace turnkeep

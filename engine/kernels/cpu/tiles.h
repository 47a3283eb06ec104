// The AMX tile registers of this thread: who configured them last, and how. Everything here is empty where there is no AMX,
// real or emulated.
#pragma once
#include <cstdint>
#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define TURNKEEP_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(TURNKEEP_EMULATE_AMX) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TURNKEEP_AMX 1
#define TURNKEEP_AMX_EMULATED 1
#include "tiles_emulated.h"
#endif

namespace turnkeep {

#ifdef TURNKEEP_AMX

#ifdef TURNKEEP_AMX_EMULATED
static inline bool request_amx() { return true; }
#else
// Linux hands out the tile registers on request, once a process.
static inline bool request_amx() {
    constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}
#endif

// Tile roles: 0..3 accumulate (rows x columns), 4 and 5 hold the left operand, 6 and 7 the right one. Tiles 0, 1 and 4 have `upper`
// rows, 2, 3 and 5 `lower`; a row is 64 bytes.
class TileShape {
  public:
    void set(int upper, int lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper;
        lower_ = lower;
        Config c;
        for (int i = 0; i < 8; i++) {
            c.column_bytes[i] = 64;
            c.rows[i] = 16;
        }
        c.rows[0] = c.rows[1] = c.rows[4] = uint8_t(upper);
        c.rows[2] = c.rows[3] = c.rows[5] = uint8_t(lower ? lower : 1);
        _tile_loadconfig(&c);
    }
    void forget() { upper_ = lower_ = -1; }
    void release() {
        if (upper_ >= 0) _tile_release();
        forget();
    }

  private:
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t column_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    int upper_ = -1, lower_ = -1;
};

#else

static inline bool request_amx() { return false; }

class TileShape {
  public:
    void forget() {}
    void release() {}
};

#endif

static inline TileShape& tile_shape() {
    thread_local TileShape shape;
    return shape;
}

}  // namespace turnkeep

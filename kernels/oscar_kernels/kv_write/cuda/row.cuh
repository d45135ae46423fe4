// A row in a warp, any row: how a decode step quantizes all of its rows, and the other kernels those few that the
// straight way does not fit.
#pragma once

#include "codes.cuh"

// A row in a warp. Its codes are one or two parts of BYTES bytes; a byte has fields of IN_BYTE quarters. A lane has
// OWN_BYTES bytes of OWN_PARTS parts, every 32nd from `l % BYTES` on, and in them the fields of QUARTERS quarters, from
// `l / BYTES * QUARTERS` on. Value `i` is of quarter `i / OWN_BYTES` of these.
template <class R>
struct WarpRow {
  static constexpr int D = R::D, EACH = D / 32, BYTES = D / 4;
  static constexpr int OWN_BYTES = BYTES > 32 ? BYTES / 32 : 1, QUARTERS = EACH / OWN_BYTES;
  static constexpr int IN_BYTE = 8 / R::BITS, OWN_PARTS = QUARTERS > IN_BYTE ? QUARTERS / IN_BYTE : 1;
  static constexpr int OWN = R::G * QUARTERS < 4 ? 1 : R::G * QUARTERS / 4;  // groups that a lane has values of
  static constexpr bool SHARED = R::G == 1 || BYTES >= 32;                   // by all lanes
  float x[EACH];
  int lane, byte, quarter;

  DEV WarpRow(int lane) : lane(lane), byte(lane % BYTES), quarter(lane / BYTES * QUARTERS) {}
  DEV int quarter_of(int i) const { return quarter + i / OWN_BYTES; }
  DEV int byte_of(int i) const { return byte + i % OWN_BYTES * 32; }

  // Columns 8 j + 2 t + e are in the order of `channel_of`.
  DEV void load(u32 row) {
    constexpr int JQ = D / 32;
    UNROLL for (int i = 0; i < EACH; i++) {
      const int at = byte_of(i), column = at % (2 * JQ) / 2 * 8 + at / (2 * JQ) * 2 + at % 2;
      x[i] = shared_load(row + (quarter_of(i) * BYTES + column) * 4);
    }
  }
  DEV void store_exact(u16* row) const {
    UNROLL for (int i = 0; i < EACH; i++)
        store_half(row + quarter_of(i) * BYTES + byte_of(i), (u16)pack_bf16(x[i], 0.f));
  }

  // The RANK-th largest magnitude of the row. As integers magnitudes have the order of floats.
  DEV float limit() const {
    int y[EACH];
    UNROLL for (int i = 0; i < EACH; i++) y[i] = (int)bits_of(fabsf(x[i]));
    UNROLL for (int i = 1; i < EACH; i++) UNROLL for (int j = i; j > 0; j--) {
      const int larger = max(y[j - 1], y[j]);
      y[j] = min(y[j - 1], y[j]);
      y[j - 1] = larger;
    }
    int found = 0, left = R::RANK;
    UNROLL_1 for (int round = 0; round < R::RANK && left > 0; round++) {  // a value more each, with all its equals
      found = reduce_max(y[0]);
      const bool mine = y[0] == found;
      left -= count(mine);
      UNROLL for (int i = 0; i < EACH; i++) y[i] = mine ? (i + 1 < EACH ? y[i + 1] : -1) : y[i];
    }
    return float_of((u32)found);
  }

  DEV static int ordered(float x) {  // integers in the order of floats
    const int bits = (int)bits_of(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
  }
  DEV static float unordered(int x) { return float_of((u32)(x ^ (x >> 31 & 0x7FFFFFFF))); }
  // Of all lanes that share a group.
  DEV static int largest(int x) {
    if (SHARED) return reduce_max(x);
    UNROLL for (int mask = 1; mask < BYTES; mask *= 2) x = max(x, shuffle_xor(x, mask));
    return x;
  }

  DEV void quantize(u8* codes, u16* affine) {
    if constexpr (R::RANK > 0) {
      const float most = limit();
      UNROLL for (int i = 0; i < EACH; i++) x[i] = fminf(fmaxf(x[i], -most), most);
    }
    u32 bits[OWN_PARTS * OWN_BYTES] = {};
    UNROLL for (int v = 0; v < OWN; v++) {
      constexpr int N = EACH / OWN;  // values of the group in this lane
      int top = ordered(x[v * N]), bottom = ~top;
      UNROLL for (int i = 1; i < N; i++) {
        top = max(top, ordered(x[v * N + i]));
        bottom = max(bottom, ~ordered(x[v * N + i]));
      }
      const float high = unordered(largest(top)), low = unordered(~largest(bottom));
      const Scale<R::BITS> scale(low, high);
      UNROLL for (int i = 0; i < N; i++) {
        const int n = v * N + i, mine = n / OWN_BYTES / IN_BYTE * OWN_BYTES + n % OWN_BYTES;
        const float place = fmaf(x[n] - scale.from, scale.inverse, scale.shift);
        const u32 code = code_bits<R::BITS>(place) & ((1 << R::BITS) - 1);
        bits[mine] |= code << R::BITS * (quarter_of(n) % IN_BYTE);
      }
      if (SHARED ? lane == 0 : byte == 0) store_word(affine + 2 * (SHARED ? v : lane / BYTES * OWN + v), scale.word);
    }
    if constexpr (QUARTERS < IN_BYTE) bits[0] |= shuffle_xor(bits[0], BYTES);
    if (QUARTERS >= IN_BYTE || lane < BYTES) {
      UNROLL for (int i = 0; i < OWN_PARTS * OWN_BYTES; i++)
          store_byte(codes + (quarter / IN_BYTE + i / OWN_BYTES) * BYTES + byte_of(i), (u8)bits[i]);
    }
  }
};

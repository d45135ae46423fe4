// The clip: one order statistic of the magnitudes of a row, exactly.
//
// A row lies in four threads; a thread has a part of two rows, g and g + 8 of its warp's sixteen. Magnitudes become
// 16-bit keys on a linear scale, two rows in one register, so a comparator serves both. The largest RANK keys are found
// by networks; the exact value with the last key is then the largest below that key's upper bound. Where two values
// share the key (1 row in a thousand), or the row is too small or large for the scale, `WarpRow` finds it. The scale
// never decides a result, only which way it is found.
#pragma once

#include "product.cuh"

constexpr float KEYS = 65000.f, ONE = 8388608.f;  // 2^23: adding it leaves the rounded number in the last bits

DEV void order(u32& low, u32& high) {
  const u32 x = min_u16x2(low, high);
  high = max_u16x2(low, high);
  low = x;
}
// Batcher's odd-even merge sort, rising; S a power of two.
template <int S, int P = 1, int K = 1>
DEV void sort(u32 (&x)[S]) {
  UNROLL for (int i = K % P; i < S - K; i++)
    if ((i - K % P) % (2 * K) < K && i / (2 * P) == (i + K) / (2 * P)) order(x[i], x[i + K]);
  if constexpr (K > 1)
    sort<S, P, K / 2>(x);
  else if constexpr (2 * P < S)
    sort<S, 2 * P, 2 * P>(x);
}
DEV constexpr int half_of(int n) { return n <= 2 ? 1 : 2 * half_of((n + 1) / 2); }  // largest power of two below n
// Sorts N numbers from LO on that fall and then rise; rising.
template <int LO, int N, int L>
DEV void sort_valley(u32 (&x)[L]) {
  if constexpr (N > 1) {
    constexpr int M = half_of(N);
    UNROLL for (int i = LO; i < LO + N - M; i++) order(x[i], x[i + M]);
    sort_valley<LO, M>(x);
    sort_valley<LO + M, N - M>(x);
  }
}

// Smallest and largest of every group of rows g and g + 8; `x[4 j + 2 i + e]` belongs to row g + 8 i. Right for rows
// whose groups all have both signs, or a zero for one of them; the others are not `plain`.
//
// As an integer with a sign the largest float is the largest if it is not negative, and as one without the smallest
// float is the largest if it is negative; three such integers are compared at once.
template <class R>
DEV void extremes(const float (&x)[R::D / 2], float (&low)[2][R::G], float (&high)[2][R::G], bool (&plain)[2]) {
  constexpr int EACH = R::D / 4 / R::G;  // values of a group and row in one thread
  UNROLL for (int i = 0; i < 2; i++) UNROLL for (int v = 0; v < R::G; v++) {
    int top = (int)__float_as_uint(x[v * EACH / 2 * 4 + 2 * i]);
    u32 bottom = (u32)top;
    UNROLL for (int n = v * EACH + 1; n < (v + 1) * EACH; n++) {
      top = max(top, (int)__float_as_uint(x[n / 2 * 4 + 2 * i + n % 2]));
      bottom = max(bottom, __float_as_uint(x[n / 2 * 4 + 2 * i + n % 2]));
    }
    UNROLL for (int mask = 1; mask <= 2; mask *= 2) {
      top = max(top, __shfl_xor_sync(ALL, top, mask));
      bottom = max(bottom, __shfl_xor_sync(ALL, bottom, mask));
    }
    high[i][v] = __uint_as_float((u32)top);
    low[i][v] = __uint_as_float(bottom);
    plain[i] &= top >= 0 && (int)bottom < 0;
  }
}

template <class R>
struct Order {
  static constexpr int N = R::D / 4, RANK = R::RANK;  // of a row in one thread
  static constexpr int S = RANK <= 4 ? 4 : RANK <= 8 ? 8 : 16, LISTS = N / S;

  // The RANK largest of all threads of a row, in no order.
  DEV static void largest(u32 (&key)[N], u32 (&top)[RANK]) {
    UNROLL for (int list = 0; list < LISTS; list++) {
      u32 x[S];
      UNROLL for (int i = 0; i < S; i++) x[i] = key[list * S + i];
      sort<S>(x);
      UNROLL for (int i = 0; i < RANK; i++) {
        if (list == 0)
          top[i] = x[S - RANK + i];
        else
          top[i] = max_u16x2(top[i], x[S - 1 - i]);
      }
      if (list > 0) sort_valley<0, RANK>(top);
    }
    UNROLL for (int mask = 1; mask <= 2; mask *= 2) {
      u32 other[RANK];
      UNROLL for (int i = 0; i < RANK; i++) other[i] = __shfl_xor_sync(ALL, top[RANK - 1 - i], mask);
      UNROLL for (int i = 0; i < RANK; i++) top[i] = max_u16x2(top[i], other[i]);
      if (mask == 1) sort_valley<0, RANK>(top);
    }
  }

  // The RANK-th largest magnitude of rows g and g + 8, whose groups have these extremes. Where it is not found the row
  // is not `plain`.
  DEV static void find(const float (&x)[2 * N], const float (&low)[2][R::G], const float (&high)[2][R::G],
                       float (&limit)[2], bool (&plain)[2]) {
    float scale[2], bound[2];
    UNROLL for (int i = 0; i < 2; i++) {
      float most = fmaxf(-low[i][0], high[i][0]);
      UNROLL for (int v = 1; v < R::G; v++) most = fmaxf(most, fmaxf(-low[i][v], high[i][v]));
      const bool fits = most > 1e-30f && most < 1e37f;
      scale[i] = fits ? __fmul_rn(KEYS, reciprocal(most)) : 0.f;
      bound[i] = fits ? __fmul_rn(most, 1.f / KEYS) : 0.f;
    }
    u32 key[N], top[RANK];
    UNROLL for (int j = 0; j < N / 2; j++) UNROLL for (int e = 0; e < 2; e++) {
      const u32 low = __float_as_uint(fmaf(fabsf(x[4 * j + e]), scale[0], ONE)),
                high = __float_as_uint(fmaf(fabsf(x[4 * j + 2 + e]), scale[1], ONE));
      key[2 * j + e] = __byte_perm(low, high, 0x5410);
    }
    largest(key, top);
    u32 last = top[0], before = ALL;  // the smallest of them, and the next
    UNROLL for (int i = 1; i < RANK; i++) {
      before = min_u16x2(before, max_u16x2(last, top[i]));
      last = min_u16x2(last, top[i]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
      const u32 mine = last >> (16 * i) & 0xFFFF, next = before >> (16 * i) & 0xFFFF;
      const float above = __fmul_rn((float)mine + 0.75f, bound[i]);  // over all of this key, under all but the next
      int nearest = 0;                                             // of negative floats the one nearest to zero is least
      UNROLL for (int j = 0; j < N / 2; j++) UNROLL for (int e = 0; e < 2; e++)
          nearest = min(nearest, (int)__float_as_uint(fabsf(x[4 * j + 2 * i + e]) - above));
      nearest = min(nearest, __shfl_xor_sync(ALL, nearest, 1));
      nearest = min(nearest, __shfl_xor_sync(ALL, nearest, 2));
      limit[i] = above + __uint_as_float((u32)nearest);  // exact: both are within a factor of two from the third key on
      plain[i] &= nearest < 0 && mine > 2 && next > mine &&
                  __float_as_uint(fmaf(limit[i], scale[i], ONE)) == __float_as_uint(ONE) + mine;
    }
  }
};

// Clip, scale, codes and their bytes: what quantizer.py defines.

// An exact tie between two codes goes up, as in the reference, because this, more than the error of a value's place in
// the range, is added to the place.
constexpr float UP = 2e-7f;

// The range of a group. A value's place in it, 0 to 1, is (x - from) * inverse + shift: `from` is 0 where the range has
// both signs, so one instruction does; elsewhere that would cancel, and it is the low end.
template <int BITS>
struct Scale {
  static constexpr float STEPS = (1 << BITS) - 1, STEP = 1.f / STEPS;
  float inverse, shift, from;
  float step, low;  // scale and offset
  u32 word;         // in 16 bits, saturated

  DEV Scale(float low, float high) {
    const float range = fmaxf(high - low, MIN_RANGE), near = reciprocal(range);
    inverse = fmaf(fmaf(-range, near, 1.f), near, near);
    from = low <= 0.f && high >= 0.f ? 0.f : low;
    shift = fmaf(from - low, inverse, UP);
    const float near_step = __fmul_rn(range, STEP);  // and the rest of it: correctly rounded (P. Markstein)
    step = fmaf(fmaf(-STEPS, near_step, range), STEP, near_step);
    this->low = low;
    const float scale = fminf(step, LARGEST), offset = fminf(fmaxf(low, -LARGEST), LARGEST);
    word = AFFINE_BF16 ? pack_bf16(scale, offset) : pack_f16(scale, offset);
  }
  DEV Scale() {}
  DEV float place(float x) const { return fmaf(x - from, inverse, shift); }
  DEV float rest(u32 code, float x) const { return fmaf(__uint_as_float(code) - ONE, step, low) - x; }  // of `code_bits`
  // What lane `from` has.
  DEV Scale of_lane(int lane) const {
    Scale other = *this;
    float* numbers[] = {&other.inverse, &other.shift, &other.from, &other.step, &other.low};
    UNROLL for (int i = 0; i < 5; i++)
        *numbers[i] = __uint_as_float(__shfl_sync(ALL, __float_as_uint(*numbers[i]), lane));
    return other;
  }
};

// 2^23 + code as a float's bits of a value at this place: code = STEPS * clamp(place, 0, 1), rounded; 0 for NaN.
template <int BITS>
DEV u32 code_bits(float place) {
  return __float_as_uint(fmaf(__saturatef(place), Scale<BITS>::STEPS, ONE));
}

// Clips the extremes of a row's groups. Codes of values beyond the limit saturate by themselves, except in groups
// narrower than the smallest range: such a row is not `plain`.
template <class R>
DEV void clip_extremes(float (&low)[R::G], float (&high)[R::G], float limit, bool& plain) {
  UNROLL for (int v = 0; v < R::G; v++) {
    low[v] = fminf(fmaxf(low[v], -limit), limit);
    high[v] = fmaxf(fminf(high[v], limit), -limit);
    plain &= !(high[v] - low[v] < MIN_RANGE);
  }
}

// Quantizes the thread's part of row g + 8 I, whose groups have these extremes, both signs each, and stores it.
template <class R, int I>
DEV void store_codes(const float (&x)[R::D / 2], const float (&low)[R::G], const float (&high)[R::G], u8* codes,
                     u16* affine, bool valid, int t) {
  constexpr int JQ = R::D / 32, IN_BYTE = 8 / R::BITS;  // quarters
  // What the bits of 2^23, 0x4B000000, leave of the last byte of a sum: 85 or 17 times them.
  constexpr u32 REST = 0x4B000000u * (R::BITS == 2 ? 85u : 17u);
  float inverse[R::G], shift[R::G];
  UNROLL for (int v = 0; v < R::G; v++) {
    const Scale<R::BITS> scale(low[v], high[v]);
    inverse[v] = scale.inverse;
    shift[v] = scale.shift;
    if (valid && t == v) store_word(affine + 2 * v, scale.word);
  }
  UNROLL for (int part = 0; part < 4 / IN_BYTE; part++) {
    u32 bytes[JQ / 2];
    UNROLL for (int w = 0; w < JQ / 2; w++) {
      bytes[w] = 0u - REST;
      UNROLL for (int b = 0; b < 4; b++) UNROLL for (int i = 0; i < IN_BYTE; i++) {
        const int q = part * IN_BYTE + i, v = q * R::G / 4;
        const float y = x[4 * (q * JQ + 2 * w + b / 2) + 2 * I + b % 2];
        bytes[w] += code_bits<R::BITS>(fmaf(y, inverse[v], shift[v])) << (8 * b + R::BITS * i);
      }
    }
    if (valid) store_words(codes + part * (R::D / 4) + 2 * JQ * t, bytes);
  }
}

// Makes the channels of rows g and g + 8 make up for the errors of those before them, see quantizer.py, as
// `WarpRow::carry_on` does. The four threads of a row take turns, each with all channels of its bytes. Weights of zero
// leave alone what had its turn.
template <class R>
DEV void carry_on(float (&x)[R::D / 2], const float (&low)[2][R::G], const float (&high)[2][R::G], u32 feedback, int lane) {
  constexpr int D = R::D, N = D / 4;  // values of a row in the thread; in the order of rounding, value k is `x[at(k)]`
  const auto at = [](int k) { return (k % 4 * (N / 4) + k / 4) / 2 * 4 + k / 4 % 2; };
  Scale<R::BITS> scale[2][R::G];
  UNROLL for (int i = 0; i < 2; i++) UNROLL for (int v = 0; v < R::G; v++) scale[i][v] = {low[i][v], high[i][v]};
  UNROLL_1 for (int owner = 0; owner < 4; owner++) UNROLL for (int k = 0; k < N; k++) {
    float rest[2];
    UNROLL for (int i = 0; i < 2; i++) {
      const Scale<R::BITS>& of = scale[i][k % 4 * R::G / 4];
      const float target = x[at(k) + 2 * i];
      const u32 code = code_bits<R::BITS>(fmaf(target, of.inverse, of.shift));
      rest[i] = __uint_as_float(__shfl_sync(ALL, __float_as_uint(of.rest(code, target)), lane / 4 * 4 + owner));
    }
    UNROLL for (int c = 0; c < N; c += 8) {
      u32 weights[4];
      shared_load<4>(feedback + place_in_feedback<D>(owner * N + k, lane % 4 * N + c), weights);
      UNROLL for (int j = 0; j < 8; j += 2) UNROLL for (int i = 0; i < 2; i++) {
        const float2 pair = unpack_f16(weights[j / 2]);
        float &one = x[at(c + j) + 2 * i], &other = x[at(c + j + 1) + 2 * i];
        one = fmaf(rest[i], pair.x, one);
        other = fmaf(rest[i], pair.y, other);
      }
    }
  }
}

// The thread's part of row g + 8 I in bfloat16.
template <int D, int I>
DEV void store_row(u16* row, const float (&x)[D / 2], int t) {
  constexpr int JQ = D / 32;
  UNROLL for (int q = 0; q < 4; q++) {
    u32 words[JQ];
    UNROLL for (int j = 0; j < JQ; j++)
        words[j] = pack_bf16(x[4 * (q * JQ + j) + 2 * I], x[4 * (q * JQ + j) + 2 * I + 1]);
    store_words(row + q * (D / 4) + 2 * JQ * t, words);
  }
}

// A row in a warp, any row: how a decode step quantizes all of its rows, and the other kernels those few that the
// straight way does not fit.

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
      x[i] = shared_float(row + (quarter_of(i) * BYTES + column) * 4);
    }
  }
  DEV void store_exact(u16* row) const {
    UNROLL for (int i = 0; i < EACH; i++)
        *(row + quarter_of(i) * BYTES + byte_of(i)) = (u16)pack_bf16(x[i], 0.f);
  }

  // The RANK-th largest magnitude of the row. As integers magnitudes have the order of floats.
  DEV float limit() const {
    int y[EACH];
    UNROLL for (int i = 0; i < EACH; i++) y[i] = (int)__float_as_uint(fabsf(x[i]));
    UNROLL for (int i = 1; i < EACH; i++) UNROLL for (int j = i; j > 0; j--) {
      const int larger = max(y[j - 1], y[j]);
      y[j] = min(y[j - 1], y[j]);
      y[j - 1] = larger;
    }
    int found = 0, left = R::RANK;
    UNROLL_1 for (int round = 0; round < R::RANK && left > 0; round++) {  // a value more each, with all its equals
      found = __reduce_max_sync(ALL, y[0]);
      const bool mine = y[0] == found;
      left -= __popc(__ballot_sync(ALL, mine));
      UNROLL for (int i = 0; i < EACH; i++) y[i] = mine ? (i + 1 < EACH ? y[i + 1] : -1) : y[i];
    }
    return __uint_as_float((u32)found);
  }

  DEV static int ordered(float x) {  // integers in the order of floats
    const int bits = (int)__float_as_uint(x);
    return bits ^ (bits >> 31 & 0x7FFFFFFF);
  }
  DEV static float unordered(int x) { return __uint_as_float((u32)(x ^ (x >> 31 & 0x7FFFFFFF))); }
  // Of all lanes that share a group.
  DEV static int largest(int x) {
    if (SHARED) return __reduce_max_sync(ALL, x);
    UNROLL for (int mask = 1; mask < BYTES; mask *= 2) x = max(x, __shfl_xor_sync(ALL, x, mask));
    return x;
  }

  // Weights of the four channels of a byte: for the later channels that this lane has, and for those of the byte.
  struct Weights {
    static constexpr int PAIRS = QUARTERS / 2;
    u32 own[4][OWN_BYTES][PAIRS], inside[4][2];
    DEV Weights(u32 from, int turn, int first) {
      UNROLL for (int q = 0; q < 4; q++) {
        const u32 row = from + place_in_feedback<D>(turn * 4 + q, 0);
        UNROLL for (int b = 0; b < OWN_BYTES; b++)
            shared_load<PAIRS>(row + place_in_feedback<D>(0, first + b * 128), own[q][b]);
        shared_load<2>(row + place_in_feedback<D>(0, turn * 4), inside[q]);
      }
    }
  };
  // Codes where a channel makes up for the errors of those before it, see quantizer.py. All lanes find the four codes
  // of a byte one after the other, and carry what they leave on to their own later channels. `range` has the scale of
  // every quarter, `target` the row before its clip.
  DEV void carry_on(u8* codes, const Scale<R::BITS> (&range)[4], float (&target)[EACH], u32 feedback) {
    constexpr int PAIRS = Weights::PAIRS, TURNS = BYTES < 32 ? BYTES : 32;
    const int first = byte * 4 + quarter;
    u32 own[OWN_BYTES] = {};
    Weights weights(feedback, 0, first);
    UNROLL for (int slot = 0; slot < OWN_BYTES; slot++) UNROLL_1 for (int turn = 0; turn < TURNS; turn++) {
      float four[4], rest[4];
      UNROLL for (int q = 0; q < 4; q++)
          four[q] = __uint_as_float(__shfl_sync(ALL, __float_as_uint(target[q % QUARTERS * OWN_BYTES + slot]),
                                                turn + q / QUARTERS * BYTES));
      const Weights next(feedback, min(slot * 32 + turn + 1, BYTES - 1), first);
      u32 found = 0;
      UNROLL for (int q = 0; q < 4; q++) {
        const u32 code = code_bits<R::BITS>(range[q].place(four[q]));
        rest[q] = range[q].rest(code, four[q]);
        found |= (code & ((1 << R::BITS) - 1)) << R::BITS * q;
        UNROLL for (int later = q + 1; later < 4; later++) {
          const float2 pair = unpack_f16(weights.inside[q][later / 2]);
          four[later] = fmaf(rest[q], later % 2 ? pair.y : pair.x, four[later]);
        }
      }
      if (byte == turn) own[slot] = found;
      UNROLL for (int q = 0; q < 4; q++) UNROLL for (int b = 0; b < OWN_BYTES; b++) UNROLL for (int n = 0; n < PAIRS; n++) {
        const float2 pair = unpack_f16(weights.own[q][b][n]);
        float &one = target[2 * n * OWN_BYTES + b], &other = target[(2 * n + 1) * OWN_BYTES + b];
        one = fmaf(rest[q], pair.x, one);
        other = fmaf(rest[q], pair.y, other);
      }
      weights = next;
    }
    if (lane < BYTES) {
      UNROLL for (int b = 0; b < OWN_BYTES; b++) UNROLL for (int part = 0; part < R::BITS / 2; part++)
          *(codes + part * BYTES + byte_of(b)) = (u8)(own[b] >> 8 * part);
    }
  }

  // `feedback` is that of the row's head, for rows that have it.
  DEV void quantize(u8* codes, u16* affine, u32 feedback) {
    float y[EACH];
    if constexpr (R::FED_BACK) {
      UNROLL for (int i = 0; i < EACH; i++) y[i] = x[i];
    }
    Scale<R::BITS> of_quarter[4];
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
      if constexpr (R::FED_BACK) {
        UNROLL for (int q = 0; q < 4; q++) {
          if (q % QUARTERS * OWN_BYTES / N == v) of_quarter[q] = scale.of_lane(q / QUARTERS * BYTES);
        }
      }
      UNROLL for (int i = 0; i < (R::FED_BACK ? 0 : N); i++) {
        const int n = v * N + i, mine = n / OWN_BYTES / IN_BYTE * OWN_BYTES + n % OWN_BYTES;
        const u32 code = code_bits<R::BITS>(scale.place(x[n])) & ((1 << R::BITS) - 1);
        bits[mine] |= code << R::BITS * (quarter_of(n) % IN_BYTE);
      }
      if (SHARED ? lane == 0 : byte == 0) store_word(affine + 2 * (SHARED ? v : lane / BYTES * OWN + v), scale.word);
    }
    if constexpr (R::FED_BACK) {
      carry_on(codes, of_quarter, y, feedback);
      return;
    }
    if constexpr (QUARTERS < IN_BYTE) bits[0] |= __shfl_xor_sync(ALL, bits[0], BYTES);
    if (QUARTERS >= IN_BYTE || lane < BYTES) {
      UNROLL for (int i = 0; i < OWN_PARTS * OWN_BYTES; i++)
          *(codes + (quarter / IN_BYTE + i / OWN_BYTES) * BYTES + byte_of(i)) = (u8)bits[i];
    }
  }
};

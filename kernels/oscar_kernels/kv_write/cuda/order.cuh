// The clip: one order statistic of the magnitudes of a row, exactly.
//
// A row lies in four threads; a thread has a part of two rows, g and g + 8 of its warp's sixteen. Magnitudes become
// 16-bit keys on a linear scale, two rows in one register, so a comparator serves both. The largest RANK keys are found
// by networks; the exact value with the last key is then the largest below that key's upper bound. Where two values
// share the key (1 row in a thousand), or the row is too small or large for the scale, row.cuh finds it. The scale
// never decides a result, only which way it is found.
#pragma once

#include "types.cuh"

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
    int top = (int)bits_of(x[v * EACH / 2 * 4 + 2 * i]);
    u32 bottom = (u32)top;
    UNROLL for (int n = v * EACH + 1; n < (v + 1) * EACH; n++) {
      top = max(top, (int)bits_of(x[n / 2 * 4 + 2 * i + n % 2]));
      bottom = max(bottom, bits_of(x[n / 2 * 4 + 2 * i + n % 2]));
    }
    UNROLL for (int mask = 1; mask <= 2; mask *= 2) {
      top = max(top, shuffle_xor(top, mask));
      bottom = max(bottom, shuffle_xor(bottom, mask));
    }
    high[i][v] = float_of((u32)top);
    low[i][v] = float_of(bottom);
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
      UNROLL for (int i = 0; i < RANK; i++) other[i] = shuffle_xor(top[RANK - 1 - i], mask);
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
      scale[i] = fits ? multiply(KEYS, reciprocal(most)) : 0.f;
      bound[i] = fits ? multiply(most, 1.f / KEYS) : 0.f;
    }
    u32 key[N], top[RANK];
    UNROLL for (int j = 0; j < N / 2; j++) UNROLL for (int e = 0; e < 2; e++) {
      const u32 low = bits_of(fmaf(fabsf(x[4 * j + e]), scale[0], ONE)),
                high = bits_of(fmaf(fabsf(x[4 * j + 2 + e]), scale[1], ONE));
      key[2 * j + e] = permute(low, high, 0x5410);
    }
    largest(key, top);
    u32 last = top[0], before = ALL;  // the smallest of them, and the next
    UNROLL for (int i = 1; i < RANK; i++) {
      before = min_u16x2(before, max_u16x2(last, top[i]));
      last = min_u16x2(last, top[i]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
      const u32 mine = last >> (16 * i) & 0xFFFF, next = before >> (16 * i) & 0xFFFF;
      const float above = multiply((float)mine + 0.75f, bound[i]);  // over all of this key, under all but the next
      int nearest = 0;                                             // of negative floats the one nearest to zero is least
      UNROLL for (int j = 0; j < N / 2; j++) UNROLL for (int e = 0; e < 2; e++)
          nearest = min(nearest, (int)bits_of(fabsf(x[4 * j + 2 * i + e]) - above));
      nearest = min(nearest, shuffle_xor(nearest, 1));
      nearest = min(nearest, shuffle_xor(nearest, 2));
      limit[i] = above + float_of((u32)nearest);  // exact: both are within a factor of two from the third key on
      plain[i] &= nearest < 0 && mine > 2 && next > mine &&
                  bits_of(fmaf(limit[i], scale[i], ONE)) == bits_of(ONE) + mine;
    }
  }
};

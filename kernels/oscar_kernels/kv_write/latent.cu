// Writes of few latents (MLA) whose rows are transformed: codes of 2 bits, with feedback or to nearest, rotary keys and
// windows. A warp has a token; a lane has the bytes lane, lane + 32, .. of its codes, four channels each.
//
// Compiled by NVRTC, or by g++ for the emulator. -D: D and ROPE channels, GROUPS, SLOT_T ROW_T POSITION_T END_T integer
// types, FEEDBACK.
#include "machine.cuh"

constexpr int BYTES = D / 4, OWN = BYTES / 32, RECORD = BYTES + 2 * ROPE;
constexpr float MIN_RANGE = 1e-8f, LARGEST = 65504.f;

struct Params {
  const float* rows;
  const u8 *rotary, *feedback;
  u8 *codes, *affine, *sink_latent, *sink_rotary, *ring_latent, *ring_rotary;
  const SLOT_T* slots;
  const ROW_T* places;
  const POSITION_T* positions;
  const END_T* ends;
  const int* sink_block;
  long long rotary_token;  // stride, in bytes
  int tokens, sink, recent, ring;
};

// The row and its rotary key as they are, in bfloat16.
DEV void store_exact(const Params& p, const float (&x)[OWN][4], const u32* rotary, u8* latents, u8* keys, long long at,
                     int lane) {
  u16* to = (u16*)latents + at * D;
  UNROLL for (int k = 0; k < OWN; k++) UNROLL for (int q = 0; q < 4; q++)
      to[q * BYTES + 32 * k + lane] = (u16)pack_bf16(x[k][q], 0.f);
  for (int i = lane; i < ROPE / 2; i += 32) store_word((u32*)keys + at * (ROPE / 2) + i, rotary[i]);
}

// Of one byte's channels, weights for those that a lane has.
struct Weights {
  uint2 of[4][OWN];
  DEV void load(const Params& p, int byte, int from, int lane) {
    UNROLL for (int q = 0; q < 4; q++) UNROLL for (int k = 0; k < OWN; k++)
        if (k >= from) of[q][k] = *(const uint2*)(p.feedback + ((long long)(4 * byte + q) * D + 4 * (32 * k + lane)) * 2);
  }
  // Adds the error of the byte's channel q to four channels of this lane.
  DEV void carry(float (&x)[4], float error, int q, int k) const {
    const float2 low = unpack_f16(of[q][k].x), high = unpack_f16(of[q][k].y);
    x[0] += error * low.x, x[1] += error * low.y, x[2] += error * high.x, x[3] += error * high.y;
  }
};

struct Scales {
  float low[4], step[4], inverse[4];  // of the quarters
  DEV Scales(const float (&x)[OWN][4]) {
    float high[4];
    UNROLL for (int q = 0; q < 4; q++) {
      low[q] = high[q] = x[0][q];
      UNROLL for (int k = 1; k < OWN; k++) low[q] = fminf(low[q], x[k][q]), high[q] = fmaxf(high[q], x[k][q]);
    }
    constexpr int TOGETHER = 4 / GROUPS;
    UNROLL for (int q = 0; q < 4; q += TOGETHER) {
      UNROLL for (int i = 1; i < TOGETHER; i++) low[q] = fminf(low[q], low[q + i]), high[q] = fmaxf(high[q], high[q + i]);
      UNROLL for (int o = 16; o > 0; o /= 2)
          low[q] = fminf(low[q], __shfl_xor_sync(ALL, low[q], o)),
          high[q] = fmaxf(high[q], __shfl_xor_sync(ALL, high[q], o));
      const float extent = fmaxf(high[q] - low[q], MIN_RANGE);
      UNROLL for (int i = 0; i < TOGETHER; i++)
          low[q + i] = low[q], step[q + i] = extent / 3.f, inverse[q + i] = 1.f / extent;
    }
  }
  DEV u32 code(float x, int q) const { return (u32)(__saturatef((x - low[q]) * inverse[q]) * 3.f + 0.5f); }
  DEV void store(u8* affine) const {
    UNROLL for (int g = 0; g < GROUPS; g++) {
      const int q = g * (4 / GROUPS);
      const float offset = fminf(fmaxf(low[q], -LARGEST), LARGEST);
      store_word(affine + 4 * g, pack_f16(fminf(step[q], LARGEST), offset));
    }
  }
};

// Codes of the byte of lane `turn` among bytes 32 * k on, whose errors move all channels behind it.
DEV void round_byte(float (&x)[OWN][4], u32 (&words)[OWN], const Scales& scales, const Weights& weights, int k, int turn,
                    int lane) {
  float target[4], errors[4];  // every lane works on its own byte; that of the lane whose turn it is counts
  UNROLL for (int q = 0; q < 4; q++) target[q] = x[k][q];
  u32 word = 0;
  UNROLL for (int q = 0; q < 4; q++) {
    const u32 code = scales.code(target[q], q);
    errors[q] = (float)code * scales.step[q] + scales.low[q] - target[q];
    word |= code << 2 * q;
    weights.carry(target, errors[q], q, k);
  }
  if (lane == turn) words[k] = word;
  UNROLL for (int q = 0; q < 4; q++) {
    const float error = __uint_as_float(__shfl_sync(ALL, __float_as_uint(errors[q]), turn));
    UNROLL for (int i = k; i < OWN; i++) weights.carry(x[i], error, q, i);
  }
}

extern "C" __global__ void __launch_bounds__(32, 1) oscar_write_latents(const __grid_constant__ Params p) {
  const int token = blockIdx.x, lane = threadIdx.x;
  if (FEEDBACK)  // all of it at once: a lane waits for what it needs next
    for (int i = token * 32 + lane; i < D * D / 64; i += p.tokens * 32) prefetch(p.feedback + 128 * i);
  const float* row = p.rows + (long long)token * D;
  const u32* rotary = (const u32*)(p.rotary + token * p.rotary_token);
  float x[OWN][4];
  UNROLL for (int k = 0; k < OWN; k++) UNROLL for (int q = 0; q < 4; q++) x[k][q] = row[q * BYTES + 32 * k + lane];
  const long long place = p.places[token], position = p.positions[token];
  if (position >= p.ends[token] - p.recent)
    store_exact(p, x, rotary, p.ring_latent, p.ring_rotary, place * p.ring + position % p.ring, lane);
  if (position < p.sink)
    store_exact(p, x, rotary, p.sink_latent, p.sink_rotary, (long long)p.sink_block[place] * p.sink + position, lane);

  const Scales scales(x);
  const long long slot = p.slots[token];
  u8* codes = p.codes + slot * RECORD;
  u32 words[OWN] = {};
  if (FEEDBACK) {
    Weights even, odd;
    even.load(p, 0, 0, lane);
    UNROLL for (int k = 0; k < OWN; k++) UNROLL_1 for (int turn = 0; turn < 32; turn += 2) {
      const int byte = 32 * k + turn;
      odd.load(p, byte + 1, k, lane);
      round_byte(x, words, scales, even, k, turn, lane);
      even.load(p, min(byte + 2, BYTES - 1), k, lane);
      round_byte(x, words, scales, odd, k, turn + 1, lane);
    }
  } else {
    UNROLL for (int k = 0; k < OWN; k++) UNROLL for (int q = 0; q < 4; q++) words[k] |= scales.code(x[k][q], q) << 2 * q;
  }
  UNROLL for (int k = 0; k < OWN; k++) codes[32 * k + lane] = (u8)words[k];
  for (int i = lane; i < ROPE / 2; i += 32) store_word((u32*)(codes + BYTES) + i, rotary[i]);
  if (lane == 0) scales.store(p.affine + slot * (4 * GROUPS));
}

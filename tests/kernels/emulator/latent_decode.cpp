// The kernel for latents as a function of a shared library.
#include "latent.cu"

extern "C" int parameters_size() { return sizeof(Params); }
// The global memory that launches may read from now on.
extern "C" void forget() { machine::readable.clear(); }
extern "C" void allow(const void* begin, size_t bytes) { machine::readable.push_back({(const u8*)begin, bytes}); }

extern "C" bool emulate(const Params* p, int columns, int rows, unsigned bytes, bool eager, unsigned seed,
                        char* message) {
  const std::string error =
      machine::run({(u32)columns, (u32)rows}, THREADS, bytes, eager, seed, [=] { oscar_latent_stage1(*p); });
  strncpy(message, error.c_str(), 200);
  return error.empty();
}

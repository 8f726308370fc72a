#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace tfo::cuda {
uint4 tfo_shared_memory[256 * 1024 / sizeof(uint4)];  // of the running block
}

namespace cuda_emulation {

Device device;
long launches = 0, cooperative_launches = 0, waits = 0;
std::set<const void*> large_kernels;

namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
constexpr int kWarp = 32;

enum class Wait { kNone, kBlock, kGrid, kWarp, kDone };

// ucontext starts a fiber; from then on setjmp and longjmp switch, which need
// no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  std::unique_ptr<char[]> stack;
  dim3 thread;
  Wait wait = Wait::kNone;
  // What the thread gives to those of `mask`, and takes.
  unsigned mask = 0;
  int source = 0;
  std::uint64_t given = 0, taken = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<unsigned char> shared;
  dim3 index;
};

jmp_buf scheduler;
Fiber* running = nullptr;
Block* current = nullptr;
const std::function<void()>* program = nullptr;

void Pause(Wait wait) {
  running->wait = wait;
  if (_setjmp(running->place) == 0) _longjmp(scheduler, 1);
}

void Trampoline() {
  (*program)();
  running->wait = Wait::kDone;
  _longjmp(scheduler, 1);
}

void Prepare(Block* block, dim3 index, const cudaLaunchConfig_t& config) {
  block->index = index;
  block->shared.assign(config.dynamicSmemBytes, 0xff);  // NaN
  const dim3 size = config.blockDim;
  block->fibers.resize(std::size_t{size.x} * size.y * size.z);
  for (std::size_t i = 0; i < block->fibers.size(); ++i) {
    Fiber& fiber = block->fibers[i];
    if (fiber.stack == nullptr) fiber.stack.reset(new char[kStackBytes]);
    fiber.wait = Wait::kNone;
    fiber.started = false;
    fiber.thread = dim3(i % size.x, i / size.x % size.y, i / size.x / size.y);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Trampoline, 0);
  }
}

void Resume(Fiber* fiber) {
  fiber->wait = Wait::kNone;
  running = fiber;
  threadIdx = fiber->thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber->started) _longjmp(fiber->place, 1);
  fiber->started = true;
  setcontext(&fiber->context);
}

// Lets the lanes go that wait for each other, once all of a mask are there.
bool ExchangeInWarp(Fiber* warp, int lanes) {
  bool any = false;
  for (int i = 0; i < lanes; ++i) {
    if (warp[i].wait != Wait::kWarp) continue;
    const unsigned mask = warp[i].mask;
    bool complete = true;
    for (int j = 0; j < kWarp; ++j) {
      if ((mask >> j & 1) == 0) continue;
      complete = complete && j < lanes && warp[j].wait == Wait::kWarp &&
                 warp[j].mask == mask;
    }
    if (!complete) continue;
    for (int j = 0; j < lanes; ++j) {
      if ((mask >> j & 1) == 0) continue;
      const int source = warp[j].source;
      if ((mask >> source & 1) == 0) std::abort();  // undefined on a GPU
      warp[j].taken = warp[source].given;
    }
    for (int j = 0; j < lanes; ++j) {
      if ((mask >> j & 1) != 0) warp[j].wait = Wait::kNone;
    }
    any = true;
  }
  return any;
}

// Runs the block until all its threads have ended or all wait for the grid;
// returns whether they have ended. A thread that waits for one that never
// comes is a deadlock.
bool RunBlock(Block* block) {
  current = block;
  blockIdx = block->index;
  unsigned char* const shared =
      reinterpret_cast<unsigned char*>(tfo::cuda::tfo_shared_memory);
  std::copy(block->shared.begin(), block->shared.end(), shared);
  std::vector<Fiber>& fibers = block->fibers;
  const int threads = static_cast<int>(fibers.size());
  bool ended = false;
  for (;;) {
    bool progress = false;
    int done = 0, at_block = 0, at_grid = 0;
    for (int i = 0; i < threads; ++i) {
      Fiber& fiber = fibers[device.reverse ? threads - 1 - i : i];
      if (fiber.wait == Wait::kNone) {
        Resume(&fiber);
        progress = true;
      }
    }
    for (int first = 0; first < threads; first += kWarp) {
      const int lanes = threads - first < kWarp ? threads - first : kWarp;
      progress |= ExchangeInWarp(&fibers[first], lanes);
    }
    for (const Fiber& fiber : fibers) {
      done += fiber.wait == Wait::kDone;
      at_block += fiber.wait == Wait::kBlock;
      at_grid += fiber.wait == Wait::kGrid;
    }
    if (done == threads || at_grid == threads) {
      ended = done == threads;
      break;
    }
    // Unlike a GPU's, a barrier here wants every thread, also those that ended.
    if (at_block == threads) {
      for (Fiber& fiber : fibers) fiber.wait = Wait::kNone;
    } else if (!progress) {
      std::abort();
    }
  }
  std::copy(shared, shared + block->shared.size(), block->shared.begin());
  return ended;
}

dim3 IndexOf(std::size_t i, dim3 grid) {
  return dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
}

}  // namespace

void SyncThreads() { Pause(Wait::kBlock); }
void SyncGrid() { Pause(Wait::kGrid); }

int LaneId() {
  return static_cast<int>(running - current->fibers.data()) % kWarp;
}

std::uint64_t Exchange(unsigned mask, std::uint64_t value, int source) {
  if ((mask >> LaneId() & 1) == 0) std::abort();
  running->mask = mask;
  running->given = value;
  running->source = source;
  Pause(Wait::kWarp);
  return running->taken;
}

cudaError_t RunGrid(const cudaLaunchConfig_t& config,
                    const std::function<void()>& body) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  const std::size_t blocks = std::size_t{grid.x} * grid.y * grid.z;
  const std::size_t threads = std::size_t{block.x} * block.y * block.z;
  if (blocks == 0 || threads == 0 || threads > 1024 || grid.y > 65535 ||
      grid.z > 65535) {
    return cudaErrorInvalidConfiguration;
  }
  if (config.dynamicSmemBytes > static_cast<std::size_t>(device.shared_bytes)) {
    return cudaErrorInvalidValue;
  }
  const bool cooperative =
      config.numAttrs == 1 && config.attrs[0].val.cooperative != 0;
  ++launches;
  program = &body;
  gridDim = grid;
  blockDim = block;
  if (!cooperative) {
    static Block* const one = new Block;  // its stacks are used again
    for (std::size_t i = 0; i < blocks; ++i) {
      Prepare(one, IndexOf(i, grid), config);
      if (!RunBlock(one)) std::abort();  // a grid barrier without a grid
    }
    return cudaSuccess;
  }
  ++cooperative_launches;
  if (blocks > static_cast<std::size_t>(device.multiprocessors) *
                   device.blocks_per_multiprocessor) {
    return cudaErrorCooperativeLaunchTooLarge;
  }
  std::vector<Block> all(blocks);
  for (std::size_t i = 0; i < blocks; ++i) {
    Prepare(&all[i], IndexOf(i, grid), config);
  }
  for (std::size_t ended = 0; ended < blocks;) {
    ended = 0;
    for (Block& block : all) ended += RunBlock(&block);
    if (ended != 0 && ended != blocks) std::abort();
    for (Block& block : all) {
      for (Fiber& fiber : block.fibers) {
        if (fiber.wait == Wait::kGrid) fiber.wait = Wait::kNone;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda_emulation

using cuda_emulation::device;

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    default:
      return "refused by the emulation";
  }
}

cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = device.multiprocessors;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = device.shared_bytes;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = device.cooperative;
      break;
  }
  return cudaSuccess;
}

// Memory begins as NaN.
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes,
                            cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

// Counts the memory that a process holds in aligned blocks, which is how torch allocates tensors on the CPU (and kernels
// their scratch space), and in all blocks. Loaded with LD_PRELOAD before everything else; benchmarks/memory.py reads it.
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

// Aligned blocks that are alive, in a table with open addressing: `free` is given an address and nothing else.
enum { SLOTS = 1 << 20 };
static struct {
  void *block;
  size_t size;
} table[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long aligned_now, aligned_peak, all_now, all_peak;

static size_t slot_of(const void *block) {
  return (size_t)(((uintptr_t)block >> 4) * 0x9E3779B97F4A7C15ull >> 44) % SLOTS;
}

static void add(long bytes, long aligned) {
  all_now += bytes;
  aligned_now += aligned;
  if (all_now > all_peak) all_peak = all_now;
  if (aligned_now > aligned_peak) aligned_peak = aligned_now;
}

static size_t find(const void *block) {  // its slot, or the free one where it would go
  size_t slot = slot_of(block);
  while (table[slot].block != NULL && table[slot].block != block) slot = (slot + 1) % SLOTS;
  return slot;
}

static void vacate(size_t hole) {  // what could no longer be found behind the hole moves into it
  for (size_t next = (hole + 1) % SLOTS; table[next].block != NULL; next = (next + 1) % SLOTS) {
    size_t home = slot_of(table[next].block);
    if ((next - home) % SLOTS < (next - hole) % SLOTS) continue;
    table[hole] = table[next];
    hole = next;
  }
  table[hole].block = NULL;
}

static void *taken(void *block, size_t aligned) {
  if (block == NULL) return NULL;
  pthread_mutex_lock(&lock);
  if (aligned) {
    size_t slot = find(block);
    table[slot].block = block;
    table[slot].size = aligned;
  }
  add((long)malloc_usable_size(block), (long)aligned);
  pthread_mutex_unlock(&lock);
  return block;
}

static void given(void *block) {
  if (block == NULL) return;
  pthread_mutex_lock(&lock);
  size_t aligned = 0, slot = find(block);
  if (table[slot].block == block) {
    aligned = table[slot].size;
    vacate(slot);
  }
  add(-(long)malloc_usable_size(block), -(long)aligned);
  pthread_mutex_unlock(&lock);
}

void *malloc(size_t size) { return taken(__libc_malloc(size), 0); }
void *calloc(size_t count, size_t size) { return taken(__libc_calloc(count, size), 0); }
void *memalign(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size), size); }
void *aligned_alloc(size_t alignment, size_t size) { return taken(__libc_memalign(alignment, size), size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
  *block = taken(__libc_memalign(alignment, size), size);
  return *block == NULL && size ? ENOMEM : 0;
}

void *realloc(void *block, size_t size) {
  given(block);
  void *moved = __libc_realloc(block, size);
  if (moved == NULL && size) taken(block, 0);  // it is still there
  return taken(moved, 0);
}

void free(void *block) {
  given(block);
  __libc_free(block);
}

// For benchmarks/memory.py: forget the peaks; read them.
void tarry_reset_peaks(void) {
  pthread_mutex_lock(&lock);
  aligned_peak = aligned_now;
  all_peak = all_now;
  pthread_mutex_unlock(&lock);
}

void tarry_peaks(long *aligned, long *all) {
  pthread_mutex_lock(&lock);
  *aligned = aligned_peak;
  *all = all_peak;
  pthread_mutex_unlock(&lock);
}

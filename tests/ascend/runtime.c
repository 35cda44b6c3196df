// SPDX-License-Identifier: Apache-2.0
// Copyright the npu-custom-ops authors
// What the lowered form of a kernel calls: allocation, strided copies, and stand-ins for the
// functions of the Ascend vector library.
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* a bump allocator, emptied before every program, filled with 0xFF: NaN in every float type */
static char *arena;
static size_t used;
static const size_t capacity = (size_t)6 << 30;

void *_mlir_memref_to_llvm_alloc(size_t size) {
  if (!arena)
    arena = mmap(0, capacity, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char *start = arena + used;
  used = (used + size + 127) & ~(size_t)63;
  if (used > capacity) { fprintf(stderr, "a program allocated over 6 GiB\n"); abort(); }
  return memset(start, 0xFF, size);
}
void *_mlir_memref_to_llvm_aligned_alloc(size_t alignment, size_t size) {
  return _mlir_memref_to_llvm_alloc(size);
}
void _mlir_memref_to_llvm_free(void *pointer) {}
void arena_reset(void) { used = 0; }

/* a descriptor holds: allocated, aligned, offset, sizes, strides */
typedef struct { int64_t rank; int64_t *descriptor; } Unranked;

void memrefCopy(int64_t size, Unranked *from, Unranked *to) {
  int64_t rank = from->rank, *a = from->descriptor, *b = to->descriptor, at[8] = {0};
  char *source = (char *)a[1] + a[2] * size, *target = (char *)b[1] + b[2] * size;
  for (int d = 0; d < rank; d++)
    if (a[3 + d] <= 0) return;
  int64_t run = 1; /* the last dimension in one piece, where it is dense on both sides */
  bool dense = rank > 0 && a[3 + 2 * rank - 1] == 1 && b[3 + 2 * rank - 1] == 1;
  int64_t outer = dense ? rank - 1 : rank;
  if (dense) run = a[3 + rank - 1];
  for (;;) {
    int64_t p = 0, q = 0;
    for (int d = 0; d < outer; d++) p += at[d] * a[3 + rank + d], q += at[d] * b[3 + rank + d];
    memcpy(target + q * size, source + p * size, run * size);
    int d = outer - 1;
    while (d >= 0 && ++at[d] == a[3 + d]) at[d--] = 0;
    if (d < 0) return;
  }
}

uint16_t __truncsfbf2(float value) { /* round to nearest even */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static int rising(const void *x, const void *y) {
  float a = *(float *)x, b = *(float *)y;
  return (a > b) - (a < b);
}
static int falling(const void *x, const void *y) { return rising(y, x); }
void stand_in_sort_f32(int64_t rank, void *pointer, bool descending) {
  int64_t *d = pointer, n = d[3 + rank - 1], rows = 1;
  for (int k = 0; k < rank - 1; k++) rows *= d[3 + k];
  float *values = (float *)d[1] + d[2];
  for (int64_t row = 0; row < rows; row++)
    qsort(values + row * n, n, 4, descending ? falling : rising);
}

#define CUMSUM(TYPE, NAME) \
  void stand_in_cumsum_##NAME(int64_t rank, void *pointer, int32_t axis, bool reverse) { \
    int64_t *d = pointer, n = d[3 + axis], inner = 1, outer = 1; \
    for (int k = 0; k < axis; k++) outer *= d[3 + k]; \
    for (int k = axis + 1; k < rank; k++) inner *= d[3 + k]; \
    TYPE *v = (TYPE *)d[1] + d[2]; \
    for (int64_t o = 0; o < outer; o++) \
      for (int64_t j = 0; j < inner; j++) \
        for (int64_t i = 1; i < n; i++) \
          if (reverse) v[(o * n + n - 1 - i) * inner + j] += v[(o * n + n - i) * inner + j]; \
          else v[(o * n + i) * inner + j] += v[(o * n + i - 1) * inner + j]; \
  }
CUMSUM(float, f32)
CUMSUM(int32_t, i32)

float __hmf_log1pf(float x) { return logf(1 + x); } /* the Ascend compiler's own formulation */

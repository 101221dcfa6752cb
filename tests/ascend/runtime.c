// Functions that a kernel's machine code calls: memory for its tiles, and checked copies between them and the arguments.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// --- what arguments a kernel may touch ---------------------------------------------------------------------------------

typedef struct {
    char* begin;
    int64_t bytes;
} Argument;

static const Argument* arguments;
static int64_t num_arguments;
static char error[256];

void fastattention_begin(const Argument* of_the_launch, int64_t count) {
    arguments = of_the_launch;
    num_arguments = count;
    error[0] = '\0';
}

// The first error since fastattention_begin; empty if there was none.
const char* fastattention_error(void) { return error; }

// A single element is loaded: llvm.py puts a call before each such load.
void fastattention_check_load(int64_t index, int64_t size) {
    if ((index < 0 || index >= size) && error[0] == '\0')
        snprintf(error, sizeof error, "loads element %ld of an argument that has %ld", (long)index, (long)size);
}

// --- arithmetic --------------------------------------------------------------------------------------------------------

// float32 to bfloat16, rounded to nearest even, as LLVM calls it on processors without an instruction for it. libgcc has
// it from version 13 on. LLVM takes the result from the low half of the register in which a float is returned.
float __truncsfbf2(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const int is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// --- memory ------------------------------------------------------------------------------------------------------------

// Fresh memory is NaN in every floating-point type: a kernel that uses what it has not written cannot hide it.
void* _mlir_memref_to_llvm_alloc(uint64_t bytes) {
    const uint64_t alignment = 64;
    bytes = (bytes + alignment - 1) / alignment * alignment;
    void* memory = aligned_alloc(alignment, bytes);
    if (memory == NULL) abort();
    return memset(memory, 0xff, bytes);
}

void _mlir_memref_to_llvm_free(void* memory) { free(memory); }

// A memory reference as MLIR passes it: sizes and then strides of `rank` axes follow the offset, all in elements.
typedef struct {
    char* allocated;  // first element of the whole argument, if this is a part of one
    char* aligned;
    int64_t offset;
    int64_t axes[];
} Memory;

typedef struct {
    int64_t rank;
    Memory* memory;
} AnyMemory;

// Whether all of `part` lies in the argument that it is a part of; memory of the kernel's own always does.
static int lies_inside(const char* what, const Memory* part, int64_t rank, int64_t bytes) {
    const int64_t *sizes = part->axes, *strides = part->axes + rank;
    int64_t first = part->offset, last = part->offset;
    for (int64_t axis = 0; axis < rank; ++axis) {
        if (sizes[axis] <= 0) return 1;
        int64_t step = (sizes[axis] - 1) * strides[axis];
        if (step < 0) first += step;
        else last += step;
    }
    const Argument* outside = NULL;
    for (const Argument* argument = arguments; argument < arguments + num_arguments; ++argument) {
        if (argument->begin != part->allocated) continue;
        if (first >= 0 && (last + 1) * bytes <= argument->bytes) return 1;
        outside = argument;
    }
    if (outside != NULL && error[0] == '\0')
        snprintf(error, sizeof error, "%s elements %ld to %ld of an argument that has %ld", what, (long)first, (long)last,
                 (long)(outside->bytes / bytes));
    return outside == NULL;
}

static void copy(const char* from, char* to, int64_t rank, const int64_t* sizes, const int64_t* from_strides,
                 const int64_t* to_strides, int64_t bytes) {
    if (rank == 0) {
        memcpy(to, from, bytes);
    } else if (rank == 1 && from_strides[0] == 1 && to_strides[0] == 1) {
        if (sizes[0] > 0) memcpy(to, from, sizes[0] * bytes);
    } else {
        for (int64_t i = 0; i < sizes[0]; ++i)
            copy(from + i * from_strides[0] * bytes, to + i * to_strides[0] * bytes, rank - 1, sizes + 1, from_strides + 1,
                 to_strides + 1, bytes);
    }
}

void memrefCopy(int64_t bytes, const AnyMemory* from, const AnyMemory* to) {
    const Memory *a = from->memory, *b = to->memory;
    if (lies_inside("loads", a, from->rank, bytes) && lies_inside("stores", b, to->rank, bytes))
        copy(a->aligned + a->offset * bytes, b->aligned + b->offset * bytes, from->rank, a->axes, a->axes + from->rank,
             b->axes + to->rank, bytes);
}

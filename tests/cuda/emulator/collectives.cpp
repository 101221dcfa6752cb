#include "collectives.hpp"

#include <cstring>

#include "numbers.hpp"
#include "shared_memory.hpp"

namespace emulator {

Wavefronts matrix_wavefronts;

namespace {

struct Shuffle {
    std::uint32_t x;
    int from_lane;
    std::uint32_t result;
};

struct MatrixLoad {
    std::uint32_t* x;
    std::uint32_t address;
};

struct Mma {
    float* c;
    const std::uint32_t *a, *b;
};

template <class Operands>
Operands& of_lane(Warp& warp, int lane) {
    return *static_cast<Operands*>(warp.operands[lane]);
}

void run_shuffle(Warp& warp) {
    for (int lane = 0; lane < kLanes; ++lane) {
        Shuffle& shuffle = of_lane<Shuffle>(warp, lane);
        shuffle.result = of_lane<Shuffle>(warp, shuffle.from_lane & 31).x;
    }
}

struct Vote {
    bool x, result;
};

void run_any_lane(Warp& warp) {
    bool any = false;
    for (int lane = 0; lane < kLanes; ++lane) any |= of_lane<Vote>(warp, lane).x;
    for (int lane = 0; lane < kLanes; ++lane) of_lane<Vote>(warp, lane).result = any;
}

void run_warp_barrier(Warp& warp) { ++warp.epoch; }

// rows[m][r]: row r of matrix m, at the address that lane 8 m + r gives.
void read_rows(Warp& warp, std::uint16_t (&rows)[4][8][8]) {
    std::uint32_t addresses[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        addresses[lane] = of_lane<MatrixLoad>(warp, lane).address;
        read_shared(warp.threads[lane], addresses[lane], rows[lane / 8][lane % 8], 16);
    }
    const Wavefronts needed = wavefronts_of(addresses, 0xffffffff, 16);
    matrix_wavefronts.counted += needed.counted;
    matrix_wavefronts.ideal += needed.ideal;
}

template <bool kTransposed>
void run_load_matrices(Warp& warp) {
    std::uint16_t rows[4][8][8];
    read_rows(warp, rows);
    for (int lane = 0; lane < kLanes; ++lane)
        for (int m = 0; m < 4; ++m) {
            const int i = lane / 4, j = lane % 4 * 2;
            const std::uint32_t low = kTransposed ? rows[m][j][i] : rows[m][i][j];
            const std::uint32_t high = kTransposed ? rows[m][j + 1][i] : rows[m][i][j + 1];
            of_lane<MatrixLoad>(warp, lane).x[m] = low | high << 16;
        }
}

struct Float16 {
    static float widen(std::uint16_t x) { return float16_to_float(x); }
};

struct Bfloat16 {
    static float widen(std::uint16_t x) { return bfloat16_to_float(x); }
};

template <class Element, int kRows, int kColumns>
void widen(float (&to)[kRows][kColumns], const std::uint16_t (&from)[kRows][kColumns]) {
    for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kColumns; ++j) to[i][j] = Element::widen(from[i][j]);
}

// c (M x N) += a (M x K) b (K x N)
template <int kM, int kN, int kK>
void multiply_add(float (&c)[kM][kN], const float (&a)[kM][kK], const float (&b)[kK][kN]) {
    for (int i = 0; i < kM; ++i) {
        float row[kN];
        std::memcpy(row, c[i], sizeof row);
        for (int k = 0; k < kK; ++k)
            for (int j = 0; j < kN; ++j) row[j] += a[i][k] * b[k][j];
        std::memcpy(c[i], row, sizeof row);
    }
}

void put_pair(std::uint16_t* to, std::uint32_t pair) { std::memcpy(to, &pair, sizeof pair); }

// With g = lane / 4 and t = lane % 4: word i of a is row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next; word i of b is
// rows 2t + 8i and the next, column g; element i of c is row g + 8 (i / 2), column 2t + i % 2.
template <class Element, int kK>
void run_mma_m16n8(Warp& warp) {
    std::uint16_t a[16][kK], b[kK][8];
    float c[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
        const Mma& mma = of_lane<Mma>(warp, lane);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < kK / 4; ++i) put_pair(&a[g + i % 2 * 8][2 * t + i / 2 * 8], mma.a[i]);
        for (int i = 0; i < kK / 8; ++i)
            for (int j = 0; j < 2; ++j) b[2 * t + 8 * i + j][g] = static_cast<std::uint16_t>(mma.b[i] >> 16 * j);
        for (int i = 0; i < 2; ++i) std::memcpy(&c[g + 8 * i][2 * t], mma.c + 2 * i, 2 * sizeof(float));
    }
    float wide_a[16][kK], wide_b[kK][8];
    widen<Element>(wide_a, a);
    widen<Element>(wide_b, b);
    multiply_add(c, wide_a, wide_b);
    for (int lane = 0; lane < kLanes; ++lane)
        for (int i = 0; i < 2; ++i)
            std::memcpy(of_lane<Mma>(warp, lane).c + 2 * i, &c[lane / 4 + 8 * i][lane % 4 * 2], 2 * sizeof(float));
}

// Multiplies 8 kHalves rows of a. A word holds four neighbouring columns of a, or rows of b; c holds the bits of integers.
template <int kHalves>
void run_mma_int8(Warp& warp) {
    constexpr int kRows = 8 * kHalves, kK = 16 * kHalves;
    std::int8_t a[kRows][kK], b[8][kK];  // b by columns
    std::int32_t c[kRows][8];
    for (int lane = 0; lane < kLanes; ++lane) {
        const Mma& mma = of_lane<Mma>(warp, lane);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < kHalves; ++i) {
            for (int j = 0; j < kHalves; ++j) std::memcpy(&a[g + 8 * i][4 * t + 16 * j], &mma.a[i + kHalves * j], 4);
            std::memcpy(&b[g][4 * t + 16 * i], &mma.b[i], 4);
            std::memcpy(&c[g + 8 * i][2 * t], mma.c + 2 * i, 8);
        }
    }
    for (int row = 0; row < kRows; ++row)
        for (int column = 0; column < 8; ++column)
            for (int k = 0; k < kK; ++k) c[row][column] += a[row][k] * b[column][k];
    for (int lane = 0; lane < kLanes; ++lane)
        for (int i = 0; i < kHalves; ++i)
            std::memcpy(of_lane<Mma>(warp, lane).c + 2 * i, &c[lane / 4 + 8 * i][lane % 4 * 2], 8);
}

// Row and column of element i of an accumulator of 8 x 8 x 4.
int row_m8n8k4(int lane, int i) { return lane % 2 + (i & 2) + lane / 16 * 4; }
int column_m8n8k4(int lane, int i) { return (i & 4) + (lane & 2) + i % 2; }

// The product of quadpair q, lanes 4q ... 4q + 3 and 4q + 16 ... 4q + 19. A lane holds row r = lane % 4 + 4 (lane / 16) of
// a. It holds column r of b or, if kRowsOfB, row lane % 4, columns 4 (lane / 16) and the next three.
template <bool kRowsOfB>
void multiply_quadpair(Warp& warp, int quadpair) {
    std::uint16_t a[8][4], b[4][8];
    float c[8][8];
    for (int i = 0; i < 8; ++i) {
        const int lane = quadpair * 4 + i % 4 + i / 4 * 16;
        const Mma& mma = of_lane<Mma>(warp, lane);
        std::uint16_t held[4];
        std::memcpy(a[i], mma.a, sizeof a[i]);
        std::memcpy(held, mma.b, sizeof held);
        for (int j = 0; j < 4; ++j) (kRowsOfB ? b[i % 4][i / 4 * 4 + j] : b[j][i]) = held[j];
        for (int j = 0; j < 8; ++j) c[row_m8n8k4(lane, j)][column_m8n8k4(lane, j)] = mma.c[j];
    }
    float wide_a[8][4], wide_b[4][8];
    widen<Float16>(wide_a, a);
    widen<Float16>(wide_b, b);
    multiply_add(c, wide_a, wide_b);
    for (int i = 0; i < 8; ++i) {
        const int lane = quadpair * 4 + i % 4 + i / 4 * 16;
        for (int j = 0; j < 8; ++j) of_lane<Mma>(warp, lane).c[j] = c[row_m8n8k4(lane, j)][column_m8n8k4(lane, j)];
    }
}

template <bool kRowsOfB>
void run_mma_m8n8k4(Warp& warp) {
    for (int quadpair = 0; quadpair < 4; ++quadpair) multiply_quadpair<kRowsOfB>(warp, quadpair);
}

const Collective kShuffle{"shuffle", run_shuffle};
const Collective kAnyLane{"any_lane", run_any_lane};
const Collective kWarpBarrier{"warp_barrier", run_warp_barrier};
const Collective kLoadMatrices{"load_matrices", run_load_matrices<false>};
const Collective kLoadMatricesTransposed{"load_matrices_transposed", run_load_matrices<true>};
const Collective kMmaM16N8K8Float16{"mma_m16n8k8_float16", run_mma_m16n8<Float16, 8>};
const Collective kMmaM16N8K16Float16{"mma_m16n8k16_float16", run_mma_m16n8<Float16, 16>};
const Collective kMmaM16N8K16Bfloat16{"mma_m16n8k16_bfloat16", run_mma_m16n8<Bfloat16, 16>};
const Collective kMmaM16N8K32Int8{"mma_m16n8k32_int8", run_mma_int8<2>};
const Collective kMmaM8N8K16Int8{"mma_m8n8k16_int8", run_mma_int8<1>};
const Collective kMmaM8N8K4RowCol{"mma_m8n8k4_row_col", run_mma_m8n8k4<false>};
const Collective kMmaM8N8K4RowRow{"mma_m8n8k4_row_row", run_mma_m8n8k4<true>};

void arrive_at_mma(const Collective& which, float* c, const std::uint32_t* a, const std::uint32_t* b) {
    Mma mma{c, a, b};
    arrive(which, &mma);
}

}  // namespace

std::uint32_t shuffle(std::uint32_t x, int from_lane) {
    Shuffle shuffle{x, from_lane, 0};
    arrive(kShuffle, &shuffle);
    return shuffle.result;
}

bool any_lane(bool x) {
    Vote vote{x, false};
    arrive(kAnyLane, &vote);
    return vote.result;
}

void warp_barrier() { arrive(kWarpBarrier, nullptr); }

void load_matrices(std::uint32_t (&x)[4], std::uint32_t address) {
    MatrixLoad load{x, address};
    arrive(kLoadMatrices, &load);
}

void load_matrices_transposed(std::uint32_t (&x)[4], std::uint32_t address) {
    MatrixLoad load{x, address};
    arrive(kLoadMatricesTransposed, &load);
}

void mma_m16n8k8_float16(float* c, const std::uint32_t* a, const std::uint32_t* b) {
    arrive_at_mma(kMmaM16N8K8Float16, c, a, b);
}
void mma_m16n8k16_float16(float* c, const std::uint32_t* a, const std::uint32_t* b) {
    arrive_at_mma(kMmaM16N8K16Float16, c, a, b);
}
void mma_m16n8k16_bfloat16(float* c, const std::uint32_t* a, const std::uint32_t* b) {
    arrive_at_mma(kMmaM16N8K16Bfloat16, c, a, b);
}
void mma_m16n8k32_int8(float* c, const std::uint32_t* a, const std::uint32_t* b) { arrive_at_mma(kMmaM16N8K32Int8, c, a, b); }
void mma_m8n8k16_int8(float* c, const std::uint32_t* a, const std::uint32_t* b) { arrive_at_mma(kMmaM8N8K16Int8, c, a, b); }
void mma_m8n8k4_row_col(float* c, const std::uint32_t* a, const std::uint32_t* b) {
    arrive_at_mma(kMmaM8N8K4RowCol, c, a, b);
}
void mma_m8n8k4_row_row(float* c, const std::uint32_t* a, const std::uint32_t* b) {
    arrive_at_mma(kMmaM8N8K4RowRow, c, a, b);
}

}  // namespace emulator

// Fixed-width integers, also where there is no standard library.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
#else
#include <cstdint>
#endif

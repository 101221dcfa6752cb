// Codes of the element types of tensors, for the fields of a call that name a dtype.
#pragma once

enum { FA_FLOAT32 = 0, FA_BFLOAT16 = 1, FA_FLOAT16 = 2, FA_INT8 = 3, FA_FLOAT8 = 4, FA_INT32 = 5, FA_INT64 = 6 };

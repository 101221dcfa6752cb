// Codes of dtypes that kernels learn at run time, in their parameters. Python reads them.
#pragma once

enum DtypeCode { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

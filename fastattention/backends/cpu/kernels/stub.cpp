extern "C" int fastattention_stub() { return 1; }

// Context lengths of a decode batch, per request or per token.
#pragma once

#include "common/types.cuh"

namespace moe_fp8::sched {

// Per request, a length counts the request's next_n new tokens, so token t sees the positions below
// length - (next_n - 1 - t). Per token, each length stands for itself.
struct ContextLens {
    const int* lens;  // [batch] or [batch, next_n]
    int next_n;
    int per_token;

    DEVICE int of(int request, int token) const {
        return per_token ? lens[request * next_n + token] : lens[request] - (next_n - 1 - token);
    }

    // Returns the number of positions that any token of the request sees.
    DEVICE int longest(int request) const {
        if (!per_token) return lens[request];
        int longest = 0;
        for (int token = 0; token < next_n; ++token) longest = max(longest, lens[request * next_n + token]);
        return longest;
    }
};

}  // namespace moe_fp8::sched

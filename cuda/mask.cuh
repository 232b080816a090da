// Which keys a query sees: the one place that knows. A band around the bottom-right aligned diagonal,
//     i + shift - left <= j <= i + shift + right,   first_key <= j < N.
// Tiles wholly outside the band are never visited, tiles wholly inside it carry no test, and in the rest an entry is
// dropped by selection.
#pragma once
#include "attention.cuh"

struct Range {
    int begin, end; // half open
};

struct Band {
    int queries, keys, first_query, first_key, low, high; // visible: low <= j - i <= high
    bool lse_flows;                                       // L has a cotangent

    DEVICE explicit Band(const Attention& a)
        : queries(a.queries), keys(a.keys), first_query(a.first_query), first_key(a.first_key), low(a.shift - a.left),
          high(a.shift + a.right), lse_flows(a.dlse.data != nullptr) {}

    // The keys that some query of [m, m + rows) may see.
    DEVICE Range keys_of(int m, int rows) const {
        Range r = {first_key, keys};
        if (MASK_LEFT)
            r.begin = max(r.begin, max(m, first_query) + low);
        if (MASK_RIGHT)
            r.end = min(r.end, min(m + rows, queries) + high);
        return r;
    }
    // The queries that may see some key of [n, n + columns).
    DEVICE Range queries_of(int n, int columns) const {
        Range r = {first_query, queries};
        if (MASK_RIGHT)
            r.begin = max(r.begin, n - high);
        if (MASK_LEFT)
            r.end = min(r.end, min(n + columns, keys) - low);
        return r;
    }
    // Whether every query of [m, m + rows) sees every key of [n, n + columns). Queries past the end need no test: their
    // L is +inf.
    DEVICE bool inside(int m, int rows, int n, int columns) const {
        bool all = n >= first_key && n + columns <= keys;
        if (MASK_LEFT)
            all = all && n - (m + rows - 1) >= low;
        if (MASK_RIGHT)
            all = all && n + columns - 1 - m <= high;
        return all;
    }
    // The m for which inside(m, rows, n, columns) holds, for a loop over m.
    DEVICE Range queries_inside(int rows, int n, int columns) const {
        constexpr int NEVER = 0x7fffffff;
        Range r = {0, NEVER};
        if (MASK_RIGHT)
            r.begin = n + columns - 1 - high;
        if (MASK_LEFT)
            r.end = n - low - rows + 2;
        if (n < first_key || n + columns > keys)
            r.begin = NEVER;
        return r;
    }
    // The n for which inside(m, rows, n, columns) holds, for a loop over n.
    DEVICE Range keys_inside(int m, int rows, int columns) const {
        Range r = {first_key, keys - columns + 1};
        if (MASK_LEFT)
            r.begin = max(r.begin, m + rows - 1 + low);
        if (MASK_RIGHT)
            r.end = min(r.end, m + high - columns + 2);
        return r;
    }
    // Entry by entry, for the portable column kernels: ranges take registers that they lack on some machines.
    DEVICE bool sees(int i, int j) const {
        bool seen = j >= first_key && j < keys;
        if (MASK_LEFT)
            seen = seen && j - i >= low;
        if (MASK_RIGHT)
            seen = seen && j - i <= high;
        return seen;
    }
    DEVICE bool flows(int i, int j) const { return sees(i, j) && (lse_flows || !alone(i)); }
    // The keys that query i sees.
    DEVICE Range seen(int i) const {
        Range r = {first_key, keys};
        if (MASK_LEFT)
            r.begin = max(r.begin, i + low);
        if (MASK_RIGHT)
            r.end = min(r.end, i + high + 1);
        return r;
    }
    // Whether query i sees one key only. Its P is then 1 and P∘F̂ exactly 0, as are dS and W unless L has a cotangent,
    // however large the logits are: kernels select so, since differences of numbers that were summed in different
    // orders would leave their rounding behind.
    DEVICE bool alone(int i) const {
        int first = first_key, last = keys - 1;
        if (MASK_LEFT)
            first = max(first, i + low);
        if (MASK_RIGHT)
            last = min(last, i + high);
        return first == last;
    }
    // The keys of query i whose P∘F̂ may be other than 0.
    DEVICE Range moving(int i) const { return alone(i) ? Range{0, 0} : seen(i); }
    // Those whose dS and W may be.
    DEVICE Range flowing(int i) const { return lse_flows ? seen(i) : moving(i); }
    // The queries that see key j, and at least `count` keys, 1 or 2: those that see fewer are at the ends. If there are
    // none, all lie before the range.
    DEVICE Range seeing(int j, int count) const {
        int more = count - 1;
        Range r = {first_query, queries};
        bool none = j < first_key || j >= keys || keys - first_key < count;
        if (MASK_RIGHT)
            r.begin = max(r.begin, max(j, first_key + more) - high);
        if (MASK_LEFT)
            r.end = min(r.end, min(j, keys - 1 - more) - low + 1);
        if (MASK_LEFT && MASK_RIGHT)
            none = none || high - low < more;
        return none ? Range{queries, 0} : r;
    }
    DEVICE Range seeing(int j) const { return seeing(j, 1); }
    // Those whose dS and W may be other than 0.
    DEVICE Range carrying(int j) const { return seeing(j, lse_flows ? 1 : 2); }
};

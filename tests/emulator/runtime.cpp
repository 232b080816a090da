// Runs the clusters of a grid one after another (without clusters: its CTAs), every thread of a cluster as a fiber, and carries out what the wrappers
// of ptx.cuh and hopper.cuh ask for.
//
// Asynchronous work is as unhelpful as its definition allows. The destination of a copy holds NaN from the moment it is issued and data lands only
// when something waits for it. Accumulators of a warpgroup product hold a marked NaN until the wait; its operands are read at the issue and again
// at the wait and must agree. Warps are ordered only by barriers (vector clocks), so an access to shared memory that no barrier orders is an error
// even when this run would have got away with it.
#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <execinfo.h>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#include <ucontext.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

struct uint3 {
    unsigned x, y, z;
};
struct Site {
    const char* file;
    int line;
};

extern "C" {
uint3 emu_thread_index, emu_block_index, emu_grid_size, emu_block_size;
}

namespace {

constexpr u32 BASE = 1024;                // the first address of dynamic shared memory, as on sm_90
constexpr u32 POISON = 0x7fe17fe1;        // NaN as float32, bfloat16 and float16
constexpr u32 IN_FLIGHT_NAN = 0x7fb15a5a; // what an accumulator holds between issue and wait
constexpr int MAX_WARPS = 32;             // of all CTAs of a cluster
constexpr u32 FLYING = 0xffffffff;        // clock of a word whose copy has not landed
constexpr size_t STACK = 512 << 10, GUARD_PAGES = 64;

typedef std::array<u32, MAX_WARPS> Clock;
void join(Clock& a, const Clock& b) {
    for (int i = 0; i < MAX_WARPS; i++) a[i] = std::max(a[i], b[i]);
}
// What of every warp's past a warp may rely on: accesses before `clock`; ordinary stores before `fenced` also by wgmma and TMA.
struct Order {
    Clock clock{}, fenced{};
};
void join(Order& a, const Order& b) {
    join(a.clock, b.clock);
    join(a.fenced, b.fenced);
}

// ---- fibers ------------------------------------------------------------------------------------------------------------
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");
struct Context {
    void* sp = nullptr;
    void start(char* stack, size_t size, void (*entry)()) {
        u64* top = reinterpret_cast<u64*>(stack + size) - 3;
        *top = 0; // the entry never returns
        *--top = reinterpret_cast<u64>(entry);
        for (int i = 0; i < 6; i++) *--top = 0;
        sp = top;
    }
    static void change(Context& from, Context& to) { emu_switch(&from.sp, to.sp); }
};
#else
struct Context {
    ucontext_t u;
    void start(char* stack, size_t size, void (*entry)()) {
        getcontext(&u);
        u.uc_stack.ss_sp = stack;
        u.uc_stack.ss_size = size;
        u.uc_link = nullptr;
        makecontext(&u, entry, 0);
    }
    static void change(Context& from, Context& to) { swapcontext(&from.u, &to.u); }
};
#endif

struct CopyAsync {
    u32 to;
    const void* from;
    int group;
    bool valid;
};
struct BulkReduce {
    float* to;
    u32 from, bytes;
    int group;
    bool read;
    std::vector<float> values;
    Site site;
};
struct Product {
    float* d;
    int n;
    const u32* a;
    u32 fragment[4];
    u64 desc_a, desc_b;
    bool ta, tb, accumulate, bfloat16;
    int group;
    Site site;
    std::vector<u16> left, right; // lane 0 only: the operands this warp reads, as they were at the issue
    std::vector<u32> words;       // lane 0 only: the chunks they came from
};
struct Flight { // an accumulator some product of which has not been waited for
    float* d;
    std::vector<float> value;
    int products;
};
struct Fiber {
    Context context;
    char* stack = nullptr;
    bool done = false, blocked = false;
    const char* what = "";
    Site site = {"", 0};
    u32 detail = 0, detail2 = 0;
    std::vector<CopyAsync> copies;
    int copy_group = 0;
    std::vector<BulkReduce> reductions;
    int bulk_group = 0;
    std::vector<Product> products;
    std::vector<Flight> flights;
    int product_group = 0;
    bool fenced = false;
    bool in_cluster = false; // between cluster_arrive and cluster_wait,
    u64 cluster_phase = 0;   // in this phase
    // the arguments of the warp operation it waits in
    const char* operation = nullptr;
    u32 address = 0;
    u32* registers = nullptr;
    float* d = nullptr;
    const u32* a = nullptr;
    u32 b[2] = {};
    u32 value = 0;
    int mode = 0;
};

struct Warp : Order {
    int arrived = 0, live = 0;
};
struct NamedBarrier {
    int expected = 0, arrived = 0;
    std::vector<int> waiting;
    Order order;
};
struct ClusterBarrier {
    int arrived = 0;
    u64 phase = 0;
    std::vector<int> waiting;
    Order arriving, completed;
};
struct Transaction {
    u32 to, bytes;
    const void* map; // null: a plain copy of bytes from `from`
    const void* from;
    int coordinates[4];
    int warp;
    u32 clock;
    Site site;
};
struct MBarrier {
    u32 count = 0, pending = 0;
    u64 phase = 0;
    long long expected = 0, issued = 0;
    std::vector<Transaction> transactions;
    std::vector<int> waiting;
    Order arriving, completed;
};
struct Shadow { // of one 4-byte word
    u32 clock = 0;
    short writer = -1;
    bool generic = false;
    bool barrier = false;
};

struct Reach { // the last time a warp reached into a CTA's shared memory
    u32 clock = 0;
    Site site = {"", 0};
};
struct Cta {
    int live = 0;
    std::map<int, NamedBarrier> named;
    std::array<Reach, MAX_WARPS> reached; // by every warp of the cluster
};

struct Region {
    char *map, *begin;
    size_t mapped, bytes;
    std::string name;
};
struct EmuMap { // what emulator.tensor_map packs: the fields of a CUtensorMap
    u64 magic, base, dim[4], stride[3], box[2], element;
};
constexpr u64 MAP_MAGIC = 0x70616d726f736e74ull;

struct Machine {
    // Of the whole cluster: CTA after CTA. A place is an offset in the arena, in which each CTA has a window of `stride` bytes.
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Cta> ctas;
    ClusterBarrier cluster;
    std::map<u32, MBarrier> mbarriers; // by place
    std::vector<u8> arena;
    std::vector<Shadow> shadow;
    std::vector<u32> reads; // [word][warp]
    std::vector<int> ready;
    size_t head = 0;
    int current = -1, live = 0, threads = 0; // threads of one CTA; live ones of all
    u32 shared_bytes = 0, stride = 1024, window = 0, first_block = 0; // the window of the current thread's CTA
    bool random = false, races = true;
    std::mt19937 generator;
    Context main;
    sigjmp_buf escape;
    bool failed = false, running = false;
    std::string message;
    void (*entry)(void**) = nullptr;
    void** arguments = nullptr;
    std::vector<char*> stacks;
    u64 switches = 0;
} m;
std::map<char*, Region> regions;

Fiber& self() { return m.fibers[m.current]; }
Warp& warp_of(int thread) { return m.warps[thread / 32]; }
int cta_of(int thread) { return thread / m.threads; }
int warp_in_group(int thread) { return thread % m.threads / 32 % 4; }

std::string format(const char* text, va_list list) {
    char buffer[2048];
    vsnprintf(buffer, sizeof buffer, text, list);
    return buffer;
}
std::string where(const Site& s) {
    return std::string(s.file ? s.file : "?") + ":" + std::to_string(s.line);
}
// Names in reports; which CTA is said where a cluster has several.
std::string of_cta(int cta) { return m.ctas.size() > 1 ? " of CTA " + std::to_string(cta) : ""; }
std::string name_of_warp(int warp) {
    int warps = m.threads / 32;
    return std::to_string(warp % warps) + of_cta(warp / warps);
}
std::string name_of_place(u32 place) { return std::to_string(place % m.stride) + of_cta(int(place / m.stride)); }
std::string who(int thread) {
    char b[160];
    int cta = cta_of(thread), local = thread % m.threads;
    snprintf(b, sizeof b, "block (%u, %u, %u), thread %d%s (warp %d, lane %d)", m.first_block + cta, emu_block_index.y, emu_block_index.z, local, of_cta(cta).c_str(),
             local / 32, local % 32);
    return b;
}
[[noreturn]] void leave() {
    m.failed = true;
    siglongjmp(m.escape, 1);
}
[[noreturn]] void fail(Site site, const char* text, ...) {
    va_list list;
    va_start(list, text);
    m.message = where(site) + ": " + format(text, list) + "\n  in " + who(m.current);
    va_end(list);
    // Where the thread that noticed it stands: the first frame in the kernel's library.
    void* frames[64];
    Dl_info kernel, info;
    int count = backtrace(frames, 64);
    if (dladdr((void*)m.entry, &kernel))
        for (int i = 0; i < count; i++)
            if (dladdr(frames[i], &info) && info.dli_fbase == kernel.dli_fbase) {
                char b[64];
                snprintf(b, sizeof b, "\n  pc %p", (void*)((char*)frames[i] - 1));
                m.message += b;
                break;
            }
    leave();
}

void deadlock() {
    std::map<std::pair<int, std::string>, std::vector<int>> groups;
    for (int t = 0; t < int(m.fibers.size()); t++) {
        Fiber& f = m.fibers[t];
        char b[512] = "finished";
        if (!f.done) snprintf(b, sizeof b, "%s (%u, %u) at %s", f.what, f.detail, f.detail2, where(f.site).c_str());
        groups[{cta_of(t), b}].push_back(t % m.threads);
    }
    std::string row = ", " + std::to_string(emu_block_index.y) + ", " + std::to_string(emu_block_index.z) + ")";
    m.message = "deadlock in block (" + std::to_string(m.first_block) + row;
    if (m.ctas.size() > 1) m.message += " to (" + std::to_string(m.first_block + m.ctas.size() - 1) + row;
    for (auto& g : groups) {
        m.message += "\n  threads";
        for (size_t i = 0; i < g.second.size();) {
            size_t j = i;
            while (j + 1 < g.second.size() && g.second[j + 1] == g.second[j] + 1) j++;
            m.message += " " + std::to_string(g.second[i]) + (j > i ? "-" + std::to_string(g.second[j]) : "");
            i = j + 1;
        }
        m.message += of_cta(g.first.first) + ": " + g.first.second;
    }
    if (m.cluster.arrived) m.message += "\n  cluster barrier: " + std::to_string(m.cluster.arrived) + " of " + std::to_string(m.live) + " threads";
    for (size_t c = 0; c < m.ctas.size(); c++)
        for (auto& b : m.ctas[c].named)
            if (b.second.arrived)
                m.message += "\n  barrier " + std::to_string(b.first) + of_cta(int(c)) + ": " + std::to_string(b.second.arrived) + " of " + std::to_string(b.second.expected) + " threads";
    for (auto& b : m.mbarriers)
        m.message += "\n  mbarrier " + name_of_place(b.first) + ": phase " + std::to_string(b.second.phase) + ", " + std::to_string(b.second.pending) + " of " + std::to_string(b.second.count) +
                     " arrivals missing, " + std::to_string(b.second.expected) + " bytes expected, " + std::to_string(b.second.issued) + " issued";
    leave();
}

void make_ready(int t) {
    m.fibers[t].blocked = false;
    m.ready.push_back(t);
}
int next() {
    if (m.head == m.ready.size()) return -1;
    if (m.random) std::swap(m.ready[m.head], m.ready[m.head + m.generator() % (m.ready.size() - m.head)]);
    int t = m.ready[m.head++];
    if (m.head > 4096 && m.head * 2 > m.ready.size()) {
        m.ready.erase(m.ready.begin(), m.ready.begin() + m.head);
        m.head = 0;
    }
    return t;
}
void resume(int t, Context& from) {
    int cta = cta_of(t);
    m.current = t;
    m.window = u32(cta) * m.stride;
    emu_thread_index = {unsigned(t - cta * m.threads), 0, 0};
    emu_block_index.x = m.first_block + unsigned(cta);
    m.switches++;
    Context::change(from, m.fibers[t].context);
}
// Gives up the processor until make_ready; the caller has put itself on some list.
void block(const char* what, Site site, u32 detail = 0, u32 detail2 = 0) {
    int me = m.current;
    Fiber& f = m.fibers[me];
    f.blocked = true;
    f.what = what, f.site = site, f.detail = detail, f.detail2 = detail2;
    int t = next();
    if (t < 0) deadlock();
    if (t != me) resume(t, f.context);
}
void release_named(NamedBarrier& b);

void finish_reductions(Fiber& f, int limit, bool only_read);

// The cluster's barrier waits for the threads that have not ended.
void settle_cluster() {
    ClusterBarrier& b = m.cluster;
    if (b.arrived == 0 || b.arrived < m.live) return;
    b.arrived = 0;
    b.phase++;
    b.completed = b.arriving;
    b.arriving = Order();
    for (int t : b.waiting) make_ready(t);
    b.waiting.clear();
}
// What reached into a CTA must come before its end by some wait of it: with other timing the CTA would have ended before.
void end_cta(int cta) {
    for (auto& b : m.mbarriers)
        if (int(b.first / m.stride) == cta && !b.second.transactions.empty())
            fail(b.second.transactions[0].site, "the block ended with this bulk copy in flight: nothing waited for it");
    int warps = m.threads / 32;
    Clock known{};
    for (int i = 0; i < warps; i++) join(known, m.warps[size_t(cta * warps + i)].clock);
    for (int i = 0; m.races && i < MAX_WARPS; i++) {
        const Reach& r = m.ctas[size_t(cta)].reached[i];
        if (r.clock > known[i]) fail(r.site, "nothing orders this, by warp %s, before the end of CTA %d", name_of_warp(i).c_str(), cta);
    }
}

void fiber_main() {
    m.entry(m.arguments);
    Fiber& f = self();
    if (!f.products.empty()) fail(f.products[0].site, "the thread ended with a wgmma that nothing waited for");
    for (auto& r : f.reductions)
        if (!r.read) fail(r.site, "the thread ended before this bulk reduction had read its source");
    finish_reductions(f, f.bulk_group, false);
    f.done = true;
    m.live--;
    warp_of(m.current).live--;
    Cta& c = m.ctas[cta_of(m.current)];
    c.live--;
    // __syncthreads waits for the threads that have not ended.
    auto b = c.named.find(0);
    if (b != c.named.end() && b->second.expected < 0 && b->second.arrived > 0 && b->second.arrived >= c.live) release_named(b->second);
    if (f.in_cluster && f.cluster_phase == m.cluster.phase) m.cluster.arrived--;
    settle_cluster();
    if (c.live == 0) end_cta(cta_of(m.current));
    if (m.live == 0) {
        m.current = -1;
        Context::change(f.context, m.main);
    }
    int t = next();
    if (t < 0) deadlock();
    resume(t, f.context);
    abort();
}

// ---- shared memory -------------------------------------------------------------------------------------------------------
// An address of a kernel has the number of the thread's CTA in its cluster above these bits.
constexpr int ADDRESS_BITS = 24;
u32 own_number() { return m.window / m.stride << ADDRESS_BITS; }
u32 offset_of(u32 a) { return a % (1u << ADDRESS_BITS) - BASE; }
// The place of an address of a kernel in the window of the current thread's CTA, or in another one.
u32 shared(u32 a, u32 bytes, Site site, const char* what, u32 window = m.window) {
    if (a - a % (1u << ADDRESS_BITS) != own_number()) fail(site, "%s at shared address %#x: not one of this CTA's", what, a);
    a %= 1u << ADDRESS_BITS;
    if (a % std::min(bytes, 16u)) fail(site, "%s of %u bytes at shared address %u: not aligned", what, bytes, a - BASE);
    if (a < BASE || a - BASE + bytes > m.shared_bytes)
        fail(site, "%s of %u bytes at shared offset %d: outside the %u bytes launched", what, bytes, int(a - BASE), m.shared_bytes);
    return a - BASE + window;
}
void check_barrier_word(u32 word, Site site, const char* what) {
    if (m.shadow[word].barrier) fail(site, "%s at shared offset %s: an mbarrier lives there", what, name_of_place(word * 4).c_str());
}
void note_read(u32 place, u32 bytes, int thread, Site site, const char* what, bool proxy = false) {
    u32 w0 = place / 4, w1 = (place + bytes + 3) / 4;
    int warp = thread / 32;
    Warp& w = m.warps[warp];
    for (u32 i = w0; i < w1; i++) {
        Shadow& s = m.shadow[i];
        check_barrier_word(i, site, what);
        if (!m.races) continue;
        if (s.writer >= 0) {
            if (s.clock == FLYING)
                fail(site, "%s of shared offset %s: a copy into it, issued by warp %s, has not been waited for", what, name_of_place(i * 4).c_str(), name_of_warp(s.writer).c_str());
            if (s.writer != warp && s.clock > w.clock[s.writer])
                fail(site, "race: %s of shared offset %s by warp %s, written by warp %s with no barrier in between", what, name_of_place(i * 4).c_str(), name_of_warp(warp).c_str(),
                     name_of_warp(s.writer).c_str());
            if (proxy && s.generic && s.clock > w.fenced[s.writer])
                fail(site, "%s of shared offset %s by warp %s: written by ordinary stores of warp %s with no proxy fence in between", what, name_of_place(i * 4).c_str(),
                     name_of_warp(warp).c_str(), name_of_warp(s.writer).c_str());
        }
        m.reads[i * MAX_WARPS + warp] = w.clock[warp];
    }
}
void note_write(u32 place, u32 bytes, int thread, Site site, const char* what, bool generic, bool flying) {
    u32 w0 = place / 4, w1 = (place + bytes + 3) / 4;
    int warp = thread / 32;
    Warp& w = m.warps[warp];
    for (u32 i = w0; i < w1; i++) {
        Shadow& s = m.shadow[i];
        check_barrier_word(i, site, what);
        if (m.races) {
            if (s.writer >= 0) {
                if (s.clock == FLYING) fail(site, "%s of shared offset %s: a copy into it, issued by warp %s, is in flight", what, name_of_place(i * 4).c_str(), name_of_warp(s.writer).c_str());
                if (s.writer != warp && s.clock > w.clock[s.writer])
                    fail(site, "race: %s of shared offset %s by warp %s, last written by warp %s with no barrier in between", what, name_of_place(i * 4).c_str(), name_of_warp(warp).c_str(),
                         name_of_warp(s.writer).c_str());
            }
            const u32* r = &m.reads[i * MAX_WARPS];
            bool raced = false;
            for (int j = 0; j < MAX_WARPS; j++) raced |= r[j] > w.clock[j];
            if (raced)
                for (int j = 0; j < MAX_WARPS; j++)
                    if (j != warp && r[j] > w.clock[j])
                        fail(site, "race: %s of shared offset %s by warp %s, read by warp %s with no barrier in between", what, name_of_place(i * 4).c_str(), name_of_warp(warp).c_str(),
                             name_of_warp(j).c_str());
        }
        s.writer = short(warp);
        s.clock = flying ? FLYING : w.clock[warp];
        s.generic = generic;
    }
}
void note_landed(u32 place, u32 bytes, int warp, u32 clock) {
    for (u32 i = place / 4; i < (place + bytes) / 4; i++) m.shadow[i].writer = short(warp), m.shadow[i].clock = clock;
}
void poison(u8* p, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 4) memcpy(p + i, &POISON, 4);
}

// ---- global memory -------------------------------------------------------------------------------------------------------
const Region* region_of(const void* p) {
    auto i = regions.upper_bound((char*)p);
    if (i == regions.begin()) return nullptr;
    --i;
    return (char*)p < i->second.begin + i->second.bytes ? &i->second : nullptr;
}
void check_global(const void* p, size_t bytes, Site site, const char* what) {
    if ((u64)p % std::min(bytes, size_t(16))) fail(site, "%s of %zu bytes at global address %p: not aligned", what, bytes, p);
    const Region* r = region_of(p);
    if (!r) fail(site, "%s of %zu bytes at %p: in no array", what, bytes, p);
    if ((char*)p + bytes > r->begin + r->bytes) fail(site, "%s of %zu bytes runs past the end of %s (offset %zd of %zu)", what, bytes, r->name.c_str(), (char*)p - r->begin, r->bytes);
}

void on_signal(int number, siginfo_t* info, void* context) {
    char* p = (char*)info->si_addr;
    char b[512];
    void* pc = nullptr;
#if defined(__x86_64__)
    pc = (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#else
    (void)context;
#endif
    std::string near = "no array is near";
    for (auto& r : regions)
        if (p >= r.second.map && p < r.second.map + r.second.mapped) {
            snprintf(b, sizeof b, "offset %zd of %s, which has %zu bytes", p - r.second.begin, r.second.name.c_str(), r.second.bytes);
            near = b;
        }
    for (size_t i = 0; i < m.stacks.size(); i++)
        if (p >= m.stacks[i] && p < m.stacks[i] + 4096) near = "the stack of a thread overflowed: too many local arrays for the emulator";
    snprintf(b, sizeof b, "%s at address %p (%s)\n  in %s\n  pc %p", number == SIGFPE ? "integer division by zero" : "invalid memory access", (void*)p, near.c_str(),
             m.current >= 0 ? who(m.current).c_str() : "the scheduler", pc);
    m.message = b;
    leave();
}

// ---- conversions -----------------------------------------------------------------------------------------------------------
u32 bits(float x) {
    u32 u;
    memcpy(&u, &x, 4);
    return u;
}
float real(u32 u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
u16 to_bfloat16(float x) {
    u32 u = bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
u16 to_float16(float x) {
    u32 u = bits(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;
    if (a >= 0x477ff000) return u16(sign | 0x7c00); // 65520 and above
    if (a < 0x38800000) {                           // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
        return u16(sign | (bits(real(a) + 0.5f) - 0x3f000000));
    }
    u32 odd = (a >> 13) & 1;
    return u16(sign | ((a - 0x38000000 + 0xfff + odd) >> 13));
}
float from_float16(u16 h) {
    u32 sign = u32(h & 0x8000) << 16, e = (h >> 10) & 31, f = h & 0x3ff;
    if (e == 31) return real(sign | 0x7f800000 | f << 13);
    if (e == 0) return (sign ? -1.0f : 1.0f) * float(f) * 0x1p-24f;
    return real(sign | (e + 112) << 23 | f << 13);
}
std::vector<float> table_float16() {
    std::vector<float> t(65536);
    for (u32 i = 0; i < 65536; i++) t[i] = from_float16(u16(i));
    return t;
}
const std::vector<float> FLOAT16 = table_float16();
inline float to_float(u16 h, bool bfloat16) { return bfloat16 ? real(u32(h) << 16) : FLOAT16[h]; }

// ---- operations of a whole warp --------------------------------------------------------------------------------------------
// The last lane to come carries the operation out for all 32.
template <class Execute>
void warp_operation(const char* operation, Site site, Execute execute) {
    int me = m.current, first = me & ~31;
    Warp& w = warp_of(me);
    self().operation = operation;
    self().site = site;
    if (w.live < 32) fail(site, "%s: a lane of the warp has ended", operation);
    if (++w.arrived < 32) {
        block(operation, site);
        return;
    }
    w.arrived = 0;
    for (int l = 0; l < 32; l++)
        if (strcmp(m.fibers[first + l].operation, operation))
            fail(site, "the warp diverged: lane %d is at %s, lane %d at %s (%s)", me % 32, operation, l, m.fibers[first + l].operation, where(m.fibers[first + l].site).c_str());
    execute(&m.fibers[first], first);
    for (int l = 0; l < 32; l++)
        if (first + l != me) make_ready(first + l);
}

// ---- mbarriers ---------------------------------------------------------------------------------------------------------------
MBarrier& mbarrier(u32 place, Site site) {
    auto i = m.mbarriers.find(place);
    if (i == m.mbarriers.end()) fail(site, "no mbarrier was initialised at shared offset %s", name_of_place(place).c_str());
    return i->second;
}
u32 swizzled(u32 a) { return a ^ ((a >> 3) & 0x70); }

void land(const Transaction& t) {
    if (!t.map) {
        memcpy(&m.arena[t.to], t.from, t.bytes);
    } else {
        EmuMap map;
        memcpy(&map, t.map, sizeof map);
        u32 chunks = u32(map.box[0] * map.element / 16), per_chunk = u32(16 / map.element);
        for (u32 r = 0; r < map.box[1]; r++)
            for (u32 c = 0; c < chunks; c++) {
                u8* to = &m.arena[swizzled(t.to + r * 128 + c * 16)];
                long long column = t.coordinates[0] + (long long)c * per_chunk, row = t.coordinates[1] + (long long)r;
                bool inside = row >= 0 && row < (long long)map.dim[1] && t.coordinates[2] >= 0 && t.coordinates[2] < (long long)map.dim[2] && t.coordinates[3] >= 0 &&
                              t.coordinates[3] < (long long)map.dim[3];
                const char* line = (const char*)map.base + row * map.stride[0] + t.coordinates[2] * map.stride[1] + t.coordinates[3] * map.stride[2];
                for (u32 e = 0; e < per_chunk; e++) {
                    long long x = column + e;
                    if (inside && x >= 0 && x < (long long)map.dim[0]) memcpy(to + e * map.element, line + x * map.element, map.element);
                    else memset(to + e * map.element, 0, map.element);
                }
            }
    }
    note_landed(t.to, t.bytes, t.warp, t.clock);
}
bool satisfied(const MBarrier& b) { return b.pending == 0 && b.expected == b.issued; }
void complete(MBarrier& b) {
    for (auto& t : b.transactions) land(t);
    b.transactions.clear();
    b.expected = b.issued = 0;
    b.pending = b.count;
    b.phase++;
    b.completed = b.arriving;
    for (int t : b.waiting) make_ready(t);
    b.waiting.clear();
}
// The window of a CTA whose shared memory the current thread is about to reach.
u32 reach(int cta, Site site, const char* what) {
    if (cta < 0 || cta >= int(m.ctas.size())) fail(site, "%s CTA %d: the cluster has %zu", what, cta, m.ctas.size());
    Cta& c = m.ctas[size_t(cta)];
    if (c.live == 0) fail(site, "%s CTA %d, which has ended", what, cta);
    int warp = m.current / 32;
    c.reached[warp] = {m.warps[warp].clock[warp], site};
    return u32(cta) * m.stride;
}
void settle(MBarrier& b) { // a phase ends only when somebody is there to see it
    if (satisfied(b) && !b.waiting.empty()) complete(b);
}
void start(u32 place, Transaction t) {
    MBarrier& b = mbarrier(place, t.site);
    if (satisfied(b) && b.expected) complete(b);
    Warp& w = warp_of(m.current);
    t.warp = m.current / 32;
    t.clock = w.clock[t.warp];
    if (t.to % m.stride + t.bytes > m.shared_bytes) fail(t.site, "bulk copy of %u bytes to shared offset %u: outside the %u bytes launched", t.bytes, t.to % m.stride, m.shared_bytes);
    note_write(t.to, t.bytes, m.current, t.site, "bulk copy", false, true);
    poison(&m.arena[t.to], t.bytes);
    b.issued += t.bytes;
    join(b.arriving, w);
    w.clock[t.warp]++;
    b.transactions.push_back(t);
    settle(b);
}

// ---- warpgroup products --------------------------------------------------------------------------------------------------------
// The elements of an operand in K-major or MN-major form under the 128-byte swizzle, [k][mn], for mn in [mn0, mn0 + count).
void operand(u64 desc, bool transposed, int mn0, int count, std::vector<u16>& out, std::vector<u32>& words, Site site) {
    u32 start = u32(desc & 0x3fff) << 4, leading = u32(desc >> 16 & 0x3fff) << 4, stride = u32(desc >> 32 & 0x3fff) << 4;
    if (desc >> 62 != 1) fail(site, "descriptor %llx: only the 128-byte swizzle is emulated", (unsigned long long)desc);
    if (desc >> 49 & 7) fail(site, "descriptor %llx: base offset is not 0", (unsigned long long)desc);
    out.resize(size_t(count) * 16);
    auto chunk = [&](u32 linear) {
        u32 p = shared(own_number() + swizzled(linear), 16, site, "wgmma operand");
        words.push_back(p);
        u16 h[8];
        memcpy(h, &m.arena[p], 16);
        return std::array<u16, 8>{h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
    };
    if (!transposed) {
        for (int i = 0; i < count; i++)
            for (int k = 0; k < 16; k += 8) {
                int mn = mn0 + i;
                auto h = chunk(start + u32(mn / 8) * stride + u32(mn % 8) * 128 + u32(k) * 2);
                for (int e = 0; e < 8; e++) out[size_t(k + e) * count + i] = h[e];
            }
    } else {
        for (int k = 0; k < 16; k++)
            for (int i = 0; i < count; i += 8) {
                int mn = mn0 + i;
                auto h = chunk(start + u32(k / 8) * stride + u32(k % 8) * 128 + u32(mn / 64) * leading + u32(mn % 64) * 2);
                for (int e = 0; e < 8; e++) out[size_t(k) * count + i + e] = h[e];
            }
    }
}
void multiply(const float* a /* [16][16], row, k */, const float* b /* [16][n] */, float* c /* [16][n] */, int n) {
    for (int r = 0; r < 16; r++)
        for (int k = 0; k < 16; k++) {
            float x = a[r * 16 + k];
            const float* row = b + k * n;
            float* out = c + r * n;
            for (int j = 0; j < n; j++) out[j] += x * row[j];
        }
}
Flight* flight_of(Fiber& f, const float* d) {
    for (auto& x : f.flights)
        if (x.d == d) return &x;
    return nullptr;
}
void retire(Fiber* lanes, int first, size_t index) {
    Product& p = lanes[0].products[index];
    int n = p.n;
    for (int l = 0; l < 32; l++) {
        Product& o = lanes[l].products[index];
        m.current = first + l;
        if (o.n != n || o.desc_b != p.desc_b || (!p.a && o.desc_a != p.desc_a) || o.accumulate != p.accumulate || !o.a != !p.a || o.group != p.group)
            fail(o.site, "wgmma: lanes of a warp disagree on descriptors or shape");
        if (o.a && memcmp(o.a, o.fragment, 16)) fail(o.site, "an A fragment of this wgmma was overwritten before the wait");
    }
    std::vector<u16> left, right;
    std::vector<u32> words;
    if (!p.a) operand(p.desc_a, p.ta, warp_in_group(first) * 16, 16, left, words, p.site);
    operand(p.desc_b, p.tb, 0, n, right, words, p.site);
    if (left != p.left || right != p.right) fail(p.site, "a shared operand of this wgmma was overwritten before the wait");
    Warp& w = warp_of(first);
    if (m.races)
        for (u32 place : words)
            for (u32 i = place / 4; i < place / 4 + 4; i++) m.reads[i * MAX_WARPS + first / 32] = w.clock[first / 32];
    float a[256];
    static thread_local std::vector<float> b, c;
    b.resize(size_t(n) * 16);
    c.assign(size_t(n) * 16, 0.0f);
    for (size_t i = 0; i < b.size(); i++) b[i] = to_float(right[i], p.bfloat16);
    if (p.a) {
        for (int l = 0; l < 32; l++)
            for (int j = 0; j < 4; j++)
                for (int e = 0; e < 2; e++)
                    a[(l / 4 + (j & 1) * 8) * 16 + (l % 4) * 2 + e + (j >> 1) * 8] = to_float(u16(lanes[l].products[index].fragment[j] >> 16 * e), p.bfloat16);
    } else {
        for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++) a[r * 16 + k] = to_float(left[k * 16 + r], p.bfloat16);
    }
    if (p.accumulate)
        for (int l = 0; l < 32; l++) {
            const float* d = flight_of(lanes[l], lanes[l].products[index].d)->value.data();
            for (int i = 0; i < n / 2; i++) c[size_t(l / 4 + (i >> 1 & 1) * 8) * n + (i >> 2) * 8 + (l % 4) * 2 + (i & 1)] = d[i];
        }
    multiply(a, b.data(), c.data(), n);
    for (int l = 0; l < 32; l++) {
        Flight* f = flight_of(lanes[l], lanes[l].products[index].d);
        for (int i = 0; i < n / 2; i++) f->value[i] = c[size_t(l / 4 + (i >> 1 & 1) * 8) * n + (i >> 2) * 8 + (l % 4) * 2 + (i & 1)];
        if (--f->products == 0) {
            m.current = first + l;
            for (int i = 0; i < n / 2; i++)
                if (bits(f->d[i]) != IN_FLIGHT_NAN) fail(p.site, "an accumulator of this wgmma (register %d) was written before the wait, or went out of scope", i);
            memcpy(f->d, f->value.data(), sizeof(float) * n / 2);
            lanes[l].flights.erase(lanes[l].flights.begin() + (f - lanes[l].flights.data()));
        }
    }
}

// Bulk reductions of groups before `limit`: their source has been read and, unless only_read, their sums are there.
void finish_reductions(Fiber& f, int limit, bool only_read) {
    size_t kept = 0;
    for (auto& r : f.reductions) {
        if (r.group < limit && !r.read) {
            if (memcmp(&m.arena[r.from], r.values.data(), r.bytes)) fail(r.site, "the source of this bulk reduction was overwritten before the wait");
            note_read(r.from, r.bytes, m.current, r.site, "bulk reduction", true);
            r.read = true;
        }
        if (r.group < limit && !only_read) {
            for (size_t i = 0; i < r.values.size(); i++) r.to[i] += r.values[i];
            continue;
        }
        if (kept != size_t(&r - f.reductions.data())) f.reductions[kept] = r;
        kept++;
    }
    f.reductions.resize(kept);
}

void release_named(NamedBarrier& b) {
    b.arrived = 0;
    b.expected = 0;
    std::vector<int> waiting;
    waiting.swap(b.waiting);
    std::vector<bool> joined(m.warps.size());
    for (int t : waiting) {
        if (!joined[t / 32]) {
            joined[t / 32] = true;
            join(m.warps[t / 32], b.order);
        }
        if (t != m.current) make_ready(t);
    }
    b.order = Order();
}

} // namespace

extern "C" {

unsigned emu_shared_base() { return own_number() + BASE; }
void emu_fail(const char* message, Site site) { fail(site, "%s", message); }

void emu_shared_load(u32 a, void* to, int bytes, Site site) {
    u32 p = shared(a, u32(bytes), site, "load");
    note_read(p, u32(bytes), m.current, site, "load");
    memcpy(to, &m.arena[p], size_t(bytes));
}
void emu_shared_store(u32 a, const void* from, int bytes, Site site) {
    u32 p = shared(a, u32(bytes), site, "store");
    note_write(p, u32(bytes), m.current, site, "store", true, false);
    memcpy(&m.arena[p], from, size_t(bytes));
}

void emu_copy_async(u32 to, const void* from, int valid, Site site) {
    u32 p = shared(to, 16, site, "cp.async");
    if (valid) check_global(from, 16, site, "cp.async");
    note_write(p, 16, m.current, site, "cp.async", true, true);
    poison(&m.arena[p], 16);
    self().copies.push_back({p, from, self().copy_group, valid != 0});
}
void emu_copy_async_commit() { self().copy_group++; }
void emu_copy_async_wait(int pending, Site) {
    Fiber& f = self();
    size_t kept = 0;
    int warp = m.current / 32;
    for (auto& c : f.copies) {
        if (c.group >= f.copy_group - pending) {
            f.copies[kept++] = c;
            continue;
        }
        if (c.valid) memcpy(&m.arena[c.to], c.from, 16);
        else memset(&m.arena[c.to], 0, 16);
        note_landed(c.to, 16, warp, m.warps[warp].clock[warp]);
    }
    f.copies.resize(kept);
}

void emu_load_matrices(u32* r, u32 a, int transposed, Site site) {
    self().registers = r;
    self().address = a;
    self().mode = transposed;
    warp_operation(transposed ? "ldmatrix.trans" : "ldmatrix", site, [&](Fiber* lanes, int first) {
        u16 rows[32][8];
        for (int l = 0; l < 32; l++) {
            u32 p = shared(lanes[l].address, 16, site, "ldmatrix");
            note_read(p, 16, first + l, site, "ldmatrix");
            memcpy(rows[l], &m.arena[p], 16);
        }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                u16 x0 = transposed ? rows[8 * i + 2 * (l % 4)][l / 4] : rows[8 * i + l / 4][2 * (l % 4)];
                u16 x1 = transposed ? rows[8 * i + 2 * (l % 4) + 1][l / 4] : rows[8 * i + l / 4][2 * (l % 4) + 1];
                lanes[l].registers[i] = x0 | u32(x1) << 16;
            }
    });
}
void emu_store_matrices(u32 a, const u32* r, int transposed, Site site) {
    self().a = r;
    self().address = a;
    warp_operation(transposed ? "stmatrix.trans" : "stmatrix", site, [&](Fiber* lanes, int first) {
        u16 rows[32][8];
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < 2; e++) {
                    u16 x = u16(lanes[l].a[i] >> 16 * e);
                    if (transposed) rows[8 * i + 2 * (l % 4) + e][l / 4] = x;
                    else rows[8 * i + l / 4][2 * (l % 4) + e] = x;
                }
        for (int l = 0; l < 32; l++) {
            u32 p = shared(lanes[l].address, 16, site, "stmatrix");
            note_write(p, 16, first + l, site, "stmatrix", true, false);
            memcpy(&m.arena[p], rows[l], 16);
        }
    });
}
void emu_mma(float* d, const u32* a, u32 b0, u32 b1, int bfloat16, Site site) {
    Fiber& f = self();
    f.d = d, f.a = a, f.b[0] = b0, f.b[1] = b1;
    warp_operation("mma", site, [&](Fiber* lanes, int) {
        float left[256], right[128], sum[128];
        for (int l = 0; l < 32; l++) {
            for (int j = 0; j < 4; j++)
                for (int e = 0; e < 2; e++)
                    left[(l / 4 + (j & 1) * 8) * 16 + (l % 4) * 2 + e + (j >> 1) * 8] = to_float(u16(lanes[l].a[j] >> 16 * e), bfloat16);
            for (int j = 0; j < 2; j++)
                for (int e = 0; e < 2; e++) right[((l % 4) * 2 + e + j * 8) * 8 + l / 4] = to_float(u16(lanes[l].b[j] >> 16 * e), bfloat16);
            for (int i = 0; i < 4; i++) sum[(l / 4 + (i >> 1) * 8) * 8 + (l % 4) * 2 + (i & 1)] = lanes[l].d[i];
        }
        multiply(left, right, sum, 8);
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) lanes[l].d[i] = sum[(l / 4 + (i >> 1) * 8) * 8 + (l % 4) * 2 + (i & 1)];
    });
}
u32 emu_shuffle_xor(u32 x, int mask, Site site) {
    Fiber& f = self();
    f.value = x;
    f.mode = mask;
    warp_operation("shuffle", site, [&](Fiber* lanes, int) {
        u32 v[32];
        for (int l = 0; l < 32; l++) v[l] = lanes[l].value;
        for (int l = 0; l < 32; l++) lanes[l].value = v[(l ^ lanes[l].mode) & 31];
    });
    return f.value;
}
u32 emu_shuffle_first(u32 x, Site site) {
    Fiber& f = self();
    f.value = x;
    warp_operation("shuffle of lane 0", site, [](Fiber* lanes, int) {
        for (int l = 1; l < 32; l++) lanes[l].value = lanes[0].value;
    });
    return f.value;
}
void emu_sync_warp(Site site) {
    warp_operation("syncwarp", site, [](Fiber*, int) {});
}

static void arrive(int id, int threads, Site site, bool wait) {
    if (id < 0 || id > 15) fail(site, "barrier %d: there are barriers 0 to 15", id);
    if (threads % 32) fail(site, "barrier %d of %d threads: not a multiple of 32", id, threads);
    Cta& c = m.ctas[cta_of(m.current)];
    NamedBarrier& b = c.named[id];
    int expected = threads ? threads : -1;
    if (b.arrived && b.expected != expected) fail(site, "barrier %d: called for %d threads while others wait for %d", id, expected, b.expected);
    b.expected = expected;
    b.arrived++;
    int warp = m.current / 32;
    join(b.order, m.warps[warp]);
    m.warps[warp].clock[warp]++;
    if (wait) b.waiting.push_back(m.current);
    if (b.arrived >= (threads ? threads : c.live)) {
        release_named(b);
        return;
    }
    if (wait) block("barrier", site, u32(id), u32(threads));
}
void emu_sync(int id, int threads, Site site) { arrive(id, threads, site, true); }
void emu_arrive(int id, int threads, Site site) { arrive(id, threads, site, false); }

void emu_reduce_add(float* p, const float* x, int count, Site site) {
    check_global(p, size_t(count) * 4, site, "reduce");
    for (int i = 0; i < count; i++) p[i] += x[i];
}
u16 emu_half(float x, int bfloat16) { return bfloat16 ? to_bfloat16(x) : to_float16(x); }
float emu_float(u16 x, int bfloat16) { return to_float(x, bfloat16); }

void emu_mbarrier_init(u32 bar, u32 count, Site site) {
    u32 p = shared(bar, 8, site, "mbarrier");
    if (count == 0) fail(site, "an mbarrier needs at least one arrival");
    MBarrier& b = m.mbarriers[p];
    b = MBarrier();
    b.count = b.pending = count;
    for (int i = 0; i < 2; i++) m.shadow[p / 4 + i].barrier = true;
    // Its initialisation is a write that others must be ordered after: they are checked when they use it.
    Warp& w = warp_of(m.current);
    m.shadow[p / 4].writer = short(m.current / 32);
    m.shadow[p / 4].clock = w.clock[m.current / 32];
}
static MBarrier& used(u32 place, Site site) {
    MBarrier& b = mbarrier(place, site);
    Shadow& s = m.shadow[place / 4];
    int warp = m.current / 32;
    if (m.races && s.writer != warp && s.clock > m.warps[warp].clock[s.writer])
        fail(site, "the mbarrier at shared offset %s is used with no barrier after its initialisation", name_of_place(place).c_str());
    return b;
}
static void arrive_at(u32 place, u32 bytes, Site site) {
    MBarrier& b = used(place, site);
    if (satisfied(b)) complete(b);
    if (b.pending == 0) fail(site, "mbarrier at shared offset %s: more than %u arrivals in one phase", name_of_place(place).c_str(), b.count);
    b.pending--;
    b.expected += bytes;
    int warp = m.current / 32;
    join(b.arriving, m.warps[warp]);
    m.warps[warp].clock[warp]++;
    settle(b);
}
void emu_mbarrier_arrive(u32 bar, u32 bytes, Site site) { arrive_at(shared(bar, 8, site, "mbarrier"), bytes, site); }
void emu_mbarrier_arrive_in(u32 bar, u32 cta, Site site) {
    u32 window = reach(int(cta), site, "an arrival in");
    arrive_at(shared(bar, 8, site, "mbarrier", window), 0, site);
}
void emu_mbarrier_wait(u32 bar, u32 parity, Site site) {
    MBarrier& b = used(shared(bar, 8, site, "mbarrier"), site);
    if (parity > 1) fail(site, "mbarrier parity %u", parity);
    if ((b.phase & 1) == parity) {
        if (satisfied(b)) {
            complete(b);
        } else {
            b.waiting.push_back(m.current);
            block("mbarrier (offset, parity)", site, offset_of(bar), parity);
        }
    }
    join(warp_of(m.current), b.completed);
}
void emu_cluster_arrive(Site site) {
    Fiber& f = self();
    ClusterBarrier& b = m.cluster;
    if (f.in_cluster) fail(site, "cluster_arrive twice with no cluster_wait in between");
    f.in_cluster = true;
    f.cluster_phase = b.phase;
    b.arrived++;
    int warp = m.current / 32;
    join(b.arriving, m.warps[warp]);
    m.warps[warp].clock[warp]++;
    settle_cluster();
}
void emu_cluster_wait(Site site) {
    Fiber& f = self();
    ClusterBarrier& b = m.cluster;
    if (!f.in_cluster) fail(site, "cluster_wait with no cluster_arrive before");
    if (f.cluster_phase == b.phase) {
        b.waiting.push_back(m.current);
        block("cluster barrier", site);
    }
    f.in_cluster = false;
    join(warp_of(m.current), b.completed);
}
// The box comes to `count` CTAs from `first` on.
static void tensor_load(u32 to, const void* map, u32 bar, int column, int row, int head, int batch, int first, int count, const char* what, Site site) {
    EmuMap e;
    memcpy(&e, map, sizeof e);
    if (e.magic != MAP_MAGIC) fail(site, "not a tensor map: this array has none, or the parameter is wrong");
    u32 bytes = u32(e.box[0] * e.box[1] * e.element);
    if (e.box[0] * e.element != 128) fail(site, "a box of %llu bytes in a row: the 128-byte swizzle needs 128", (unsigned long long)(e.box[0] * e.element));
    if (to % 1024) fail(site, "a swizzled tensor load to shared offset %u: not a multiple of 1024", offset_of(to));
    if (e.base && head >= 0 && batch >= 0 && u64(head) < e.dim[2] && u64(batch) < e.dim[3] && e.dim[0] && e.dim[1]) {
        const char* corner = (const char*)e.base + u64(head) * e.stride[1] + u64(batch) * e.stride[2];
        if (e.stride[0] || e.dim[1] == 1) check_global(corner, 16, site, "tensor load");
        const Region* r = region_of(corner);
        if (corner + (e.dim[1] - 1) * e.stride[0] + e.dim[0] * e.element > r->begin + r->bytes) fail(site, "the tensor map reaches past the end of %s", r->name.c_str());
    }
    for (int cta = first; cta < first + count; cta++) {
        u32 window = reach(cta, site, what), place = shared(bar, 8, site, "mbarrier", window);
        used(place, site);
        Transaction t = {};
        t.to = shared(to, 16, site, "bulk copy", window), t.bytes = bytes, t.map = map, t.site = site;
        t.coordinates[0] = column, t.coordinates[1] = row, t.coordinates[2] = head, t.coordinates[3] = batch;
        start(place, t);
    }
}
void emu_tensor_load(u32 to, const void* map, u32 bar, int column, int row, int head, int batch, Site site) {
    tensor_load(to, map, bar, column, row, head, batch, cta_of(m.current), 1, "a tensor load to", site);
}
void emu_tensor_load_multicast(u32 to, const void* map, u32 bar, int column, int row, int head, int batch, int ctas, Site site) {
    if (ctas < 1 || ctas > int(m.ctas.size())) fail(site, "a multicast to %d CTAs: the cluster has %zu", ctas, m.ctas.size());
    tensor_load(to, map, bar, column, row, head, batch, 0, ctas, "a multicast to", site);
}
void emu_bulk_load(u32 to, const void* from, u32 bytes, u32 bar, Site site) {
    u32 place = shared(bar, 8, site, "mbarrier");
    used(place, site);
    if (bytes % 16 || bytes == 0) fail(site, "a bulk copy of %u bytes: not a positive multiple of 16", bytes);
    if ((u64)from % 16) fail(site, "a bulk copy from %p: not 16-byte aligned", from);
    const Region* r = region_of(from);
    if (!r || (const char*)from + bytes > r->begin + r->bytes) fail(site, "a bulk copy of %u bytes leaves %s", bytes, r ? r->name.c_str() : "every array");
    Transaction t = {};
    t.to = shared(to, 16, site, "bulk copy"), t.bytes = bytes, t.from = from, t.site = site;
    start(place, t);
}
void emu_proxy_fence() {
    Warp& w = warp_of(m.current);
    int warp = m.current / 32;
    join(w.fenced, w.clock);
    w.clock[warp]++; // later stores are not covered
}
void emu_name(void*) {}
void emu_registers(int count, Site site) {
    if (count < 24 || count > 256 || count % 8) fail(site, "setmaxnreg of %d: 24 to 256 in steps of 8", count);
}
void emu_bulk_reduce(float* to, u32 from, u32 bytes, Site site) {
    u32 p = shared(from, 16, site, "bulk reduction");
    if (bytes % 16 || offset_of(from) + bytes > m.shared_bytes) fail(site, "a bulk reduction of %u bytes from shared offset %u", bytes, offset_of(from));
    check_global(to, 16, site, "bulk reduction");
    check_global((char*)to + bytes - 16, 16, site, "bulk reduction");
    note_read(p, bytes, m.current, site, "bulk reduction", true);
    Fiber& f = self();
    const float* values = (const float*)&m.arena[p];
    f.reductions.push_back({to, p, bytes, f.bulk_group, false, std::vector<float>(values, values + bytes / 4), site});
}
void emu_bulk_commit() { self().bulk_group++; }
void emu_bulk_wait(int pending, int only_read, Site) { finish_reductions(self(), self().bulk_group - pending, only_read); }
void emu_wgmma_fence() { self().fenced = true; }
void emu_wgmma(float* d, int n, const u32* a, u64 desc_a, u64 desc_b, int ta, int tb, int accumulate, int bfloat16, Site site) {
    Fiber& f = self();
    int first = m.current & ~31;
    if (n % 8 || n < 8 || n > 256) fail(site, "wgmma with N = %d", n);
    if (!f.fenced) fail(site, "no wgmma.fence since the last wait");
    f.products.emplace_back();
    Product& p = f.products.back();
    p.d = d, p.n = n, p.a = a, p.desc_a = desc_a, p.desc_b = desc_b, p.ta = ta, p.tb = tb, p.accumulate = accumulate, p.bfloat16 = bfloat16, p.group = f.product_group, p.site = site;
    if (a) memcpy(p.fragment, a, 16);
    if (m.current == first) {
        if (!a) operand(desc_a, ta, warp_in_group(first) * 16, 16, p.left, p.words, site);
        operand(desc_b, tb, 0, n, p.right, p.words, site);
        for (u32 w : p.words) note_read(w, 16, m.current, site, "wgmma", true);
    }
    Flight* x = flight_of(f, d);
    if (!x) {
        f.flights.push_back({d, std::vector<float>(d, d + n / 2), 0});
        x = &f.flights.back();
        for (int i = 0; i < n / 2; i++) memcpy(d + i, &IN_FLIGHT_NAN, 4);
    } else if (int(x->value.size()) != n / 2) {
        fail(site, "wgmma on accumulators that are in flight with another shape");
    }
    x->products++;
}
void emu_wgmma_commit() { self().product_group++; }
void emu_wgmma_wait(int pending, Site site) {
    self().mode = pending;
    self().fenced = false;
    warp_operation("wgmma.wait", site, [&](Fiber* lanes, int first) {
        int me = m.current, limit = lanes[0].product_group - pending;
        size_t retired = 0;
        while (retired < lanes[0].products.size() && lanes[0].products[retired].group < limit) retired++;
        for (int l = 0; l < 32; l++)
            if (lanes[l].mode != pending || lanes[l].product_group != lanes[0].product_group || lanes[l].products.size() != lanes[0].products.size())
                fail(site, "wgmma.wait: the lanes of a warp have issued different products");
        for (size_t i = 0; i < retired; i++) retire(lanes, first, i);
        m.current = me;
        for (int l = 0; l < 32; l++) lanes[l].products.erase(lanes[l].products.begin(), lanes[l].products.begin() + retired);
    });
}

// ---- the host's side -------------------------------------------------------------------------------------------------------------
// `bytes` of memory that end (up to 15 bytes) at an unmapped page and begin after one; the address is `residue` modulo 16.
void* emu_allocate(u64 bytes, u32 residue, const char* name) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const size_t guard = GUARD_PAGES * page, body = (bytes + 31 + page - 1) / page * page, total = body + 2 * guard;
    char* map = (char*)mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    mprotect(map, guard, PROT_NONE);
    mprotect(map + guard + body, guard, PROT_NONE);
    memset(map + guard, 0xff, body);
    u64 begin = (u64)(map + guard + body) - bytes;
    begin -= (begin - residue) % 16;
    regions[(char*)begin] = {map, (char*)begin, total, bytes, name};
    return (void*)begin;
}
// 1 where the slack around the region was written to.
int emu_free(void* p) {
    const size_t guard = GUARD_PAGES * size_t(sysconf(_SC_PAGESIZE));
    Region r = regions.at((char*)p);
    int touched = 0;
    for (char* q = r.map + guard; q < r.begin; q++) touched |= *q != char(0xff);
    for (char* q = r.begin + r.bytes; q < r.map + r.mapped - guard; q++) touched |= *q != char(0xff);
    munmap(r.map, r.mapped);
    regions.erase((char*)p);
    return touched;
}
const char* emu_message() { return m.message.c_str(); }

// Runs one grid of clusters of `ctas` CTAs; 0, or 1 with a message.
int emu_run(void (*entry)(void**), void** arguments, u32 gx, u32 gy, u32 gz, int ctas, int threads, u32 shared_bytes, u32 seed, int races) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    m.failed = false;
    m.message.clear();
    m.entry = entry, m.arguments = arguments;
    m.threads = threads;
    m.shared_bytes = shared_bytes;
    m.stride = shared_bytes / 1024 * 1024 + 1024;
    m.random = seed != 0;
    m.races = races != 0;
    m.generator.seed(seed);
    if (threads < 32 || threads > 32 * MAX_WARPS || threads % 32) {
        m.message = "the number of threads is not a multiple of 32 up to 1024";
        return 1;
    }
    const int all = threads * ctas;
    if (ctas < 1 || ctas > MAX_WARPS || all > 32 * MAX_WARPS) {
        m.message = "a cluster of " + std::to_string(ctas) + " CTAs of " + std::to_string(threads / 32) + " warps: there may be " + std::to_string(MAX_WARPS) + " warps in all";
        return 1;
    }
    if (gx % u32(ctas)) {
        m.message = "a grid of " + std::to_string(gx) + " blocks is not a multiple of the cluster of " + std::to_string(ctas);
        return 1;
    }
    while (int(m.stacks.size()) < all) {
        char* s = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(s, page, PROT_NONE);
        m.stacks.push_back(s);
    }
    static char alternate[1 << 16];
    stack_t previous_stack, mine = {};
    mine.ss_sp = alternate, mine.ss_size = sizeof alternate;
    sigaltstack(&mine, &previous_stack);
    struct sigaction action = {}, previous[3];
    const int numbers[3] = {SIGSEGV, SIGBUS, SIGFPE};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(numbers[i], &action, &previous[i]);

    emu_grid_size = {gx, gy, gz};
    emu_block_size = {unsigned(threads), 1, 1};
    if (sigsetjmp(m.escape, 1) == 0) {
        for (u32 z = 0; z < gz; z++)
            for (u32 y = 0; y < gy; y++)
                for (u32 x = 0; x < gx; x += u32(ctas)) {
                    m.first_block = x;
                    emu_block_index = {x, y, z};
                    m.fibers.assign(size_t(all), Fiber());
                    m.warps.assign(size_t(all / 32), Warp());
                    m.ctas.assign(size_t(ctas), Cta());
                    m.cluster = ClusterBarrier();
                    m.mbarriers.clear();
                    m.arena.resize(size_t(ctas) * m.stride);
                    m.shadow.assign(m.arena.size() / 4, Shadow());
                    if (m.races) m.reads.assign(m.arena.size() / 4 * MAX_WARPS, 0);
                    m.ready.clear();
                    m.head = 0;
                    m.live = all;
                    for (int c = 0; c < ctas; c++) {
                        m.ctas[c].live = threads;
                        for (u32 i = 0; i + 4 <= shared_bytes; i += 4) memcpy(&m.arena[u32(c) * m.stride + i], &POISON, 4);
                    }
                    for (int t = 0; t < all; t++) {
                        m.fibers[t].stack = m.stacks[t];
                        m.fibers[t].context.start(m.stacks[t], STACK, fiber_main);
                        m.warps[t / 32].live++;
                        m.ready.push_back(t);
                    }
                    for (size_t i = 0; i < m.warps.size(); i++) m.warps[i].clock[i] = 1;
                    resume(next(), m.main);
                }
    }
    m.current = -1;
    for (int i = 0; i < 3; i++) sigaction(numbers[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
    return m.failed;
}
u64 emu_switches() { return m.switches; }
}

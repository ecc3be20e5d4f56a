/* A pool of threads that share the parts of a short piece of work.
 *
 * The calling thread works too, and a part is claimed only by a thread that is running. So the
 * caller never waits for a thread to wake up, only for parts that another thread has begun. Idle
 * threads, and a caller that waits for the last parts, look for some microseconds, since a step is
 * many short pieces, and then sleep. On a busy machine, looking for longer would take the processor
 * from the threads that are waited for.
 *
 * A work is one call of `share_out`; its parts have the numbers from 0 on.
 */
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MOST_THREADS 64
#define AWAKE_NS 20000 /* how long an idle thread looks for work before it sleeps */

typedef void Part(void *work, int part);

static struct {
    pthread_mutex_t busy; /* held by the caller whose work is shared out */
    int threads;          /* in addition to the caller */
    Part *run;
    void *work;
    /* high half: the number of the work; low half: how many of its parts no thread has claimed */
    _Atomic uint64_t unclaimed;
    _Atomic uint32_t unfinished; /* parts; the caller sleeps on it */
    _Atomic int caller_sleeps;
    _Atomic uint32_t works; /* how many works there were; idle threads sleep on it */
    _Atomic int asleep;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER};

static inline void relax(void) {
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Claims and runs parts until there are none. What is read of the pool after a claim belongs to the
 * claimed part: its work cannot end before the part is finished. */
static void run_unclaimed_parts(void) {
    uint64_t seen = atomic_load(&pool.unclaimed);
    while ((uint32_t)seen) {
        if (!atomic_compare_exchange_weak(&pool.unclaimed, &seen, seen - 1)) continue;
        pool.run(pool.work, (int)(uint32_t)seen - 1);
        if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && atomic_load(&pool.caller_sleeps)) {
            syscall(SYS_futex, &pool.unfinished, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
        }
        seen = atomic_load(&pool.unclaimed);
    }
}

/* Waits until other threads have finished the parts that they have claimed. */
static void wait_for_last_parts(void) {
    int64_t sleep_at = now_ns() + AWAKE_NS;
    uint32_t left;
    while (atomic_load(&pool.unfinished) && now_ns() < sleep_at) relax();
    atomic_store(&pool.caller_sleeps, 1);
    while ((left = atomic_load(&pool.unfinished))) {
        syscall(SYS_futex, &pool.unfinished, FUTEX_WAIT_PRIVATE, left, NULL, NULL, 0);
    }
    atomic_store(&pool.caller_sleeps, 0);
}

/* The body of a thread of the pool: runs parts of every work, and sleeps between works. */
static void *helping_thread(void *unused) {
    (void)unused;
    for (;;) {
        uint32_t works = atomic_load(&pool.works);
        run_unclaimed_parts();
        int64_t sleep_at = now_ns() + AWAKE_NS;
        while (atomic_load(&pool.works) == works && now_ns() < sleep_at) relax();
        if (atomic_load(&pool.works) != works) continue;
        atomic_fetch_add(&pool.asleep, 1);
        syscall(SYS_futex, &pool.works, FUTEX_WAIT_PRIVATE, works, NULL, NULL, 0);
        atomic_fetch_sub(&pool.asleep, 1);
    }
    return NULL;
}

/* Runs the parts 0 to parts - 1, on up to `threads` threads. Any thread may call it; while another
 * call uses the pool, the caller does all parts itself. */
static void share_out(Part *run, void *work, int parts, int threads) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > parts) threads = parts;
    if (threads < 2 || pthread_mutex_trylock(&pool.busy)) {
        for (int part = 0; part < parts; part++) run(work, part);
        return;
    }
    while (pool.threads < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helping_thread, NULL)) break;
        pthread_detach(thread);
        pool.threads++;
    }
    pool.run = run;
    pool.work = work;
    atomic_store(&pool.unfinished, (uint32_t)parts);
    uint64_t number = atomic_load(&pool.works) + UINT64_C(1);
    atomic_store(&pool.unclaimed, number << 32 | (uint32_t)parts);
    atomic_fetch_add(&pool.works, 1);
    if (atomic_load(&pool.asleep)) {
        syscall(SYS_futex, &pool.works, FUTEX_WAKE_PRIVATE, threads - 1, NULL, NULL, 0);
    }
    run_unclaimed_parts();
    wait_for_last_parts();
    pthread_mutex_unlock(&pool.busy);
}

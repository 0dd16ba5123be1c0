/* What the kernel takes to wake processes that sleep on a word of shared memory, with nothing of ours around it.

   ring_limit NUM_READERS NUM_MESSAGES PACE_US    prints each message's way to the first reader, in nanoseconds

   The readers sleep on `head`, the writer on `answered`, which the first reader raises when it has been woken. */

#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct shared {
    _Alignas(64) _Atomic uint32_t head;
    _Alignas(64) _Atomic uint32_t answered;
    _Alignas(64) int64_t sent_ns;
    int64_t late_ns[];
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(_Atomic uint32_t *word, uint32_t seen) {
    while (*word == seen) syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void publish(_Atomic uint32_t *word, uint32_t value) {
    *word = value;
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void read_all(struct shared *shared, uint32_t count, int answers) {
    for (uint32_t n = 0; n < count; n++) {
        sleep_until(&shared->head, n);
        if (!answers) continue;
        shared->late_ns[n] = now_ns() - shared->sent_ns;
        publish(&shared->answered, n + 1);
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int num_readers = atoi(argv[1]);
    uint32_t count = (uint32_t)atoi(argv[2]);
    struct timespec pace = {0, 1000L * atol(argv[3])};
    size_t bytes = sizeof(struct shared) + count * sizeof(int64_t);
    struct shared *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    for (int reader = 0; reader < num_readers; reader++) {
        pid_t child = fork();
        if (child < 0) return 1;
        if (child == 0) {
            read_all(shared, count, reader == 0);
            _exit(0);
        }
    }
    for (uint32_t n = 0; n < count; n++) {
        nanosleep(&pace, NULL);
        shared->sent_ns = now_ns();
        publish(&shared->head, n + 1);
        sleep_until(&shared->answered, n);
    }
    while (wait(NULL) > 0) {}
    for (uint32_t n = 0; n < count; n++) printf("%lld\n", (long long)shared->late_ns[n]);
    return 0;
}

/* Preloaded into a process: its wall clock is ahead of the machine's by the seconds in the file CLOCK_SHIFT, a double in its
   binary form, which may change at any time. The monotonic clock stays as it is.

   Absolute times that the process waits for are shifted back, because the kernel knows the machine's clock only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *shift;
static const double none = 0.0;
#define SINCE_1970 1000000000
/* Seconds. A smaller time is one of the monotonic clock. */

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("CLOCK_SHIFT");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    shift = mapped == MAP_FAILED ? &none : mapped;
    if (fd >= 0) close(fd);
}

static void move(struct timespec *at, double seconds) {
    at->tv_sec += (time_t)floor(seconds);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) move(now, *shift);
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    if (zone) memset(zone, 0, sizeof(struct timezone));
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

static struct timespec real_time(const struct timespec *deadline) {
    struct timespec real = *deadline;
    if (shift && real.tv_sec > SINCE_1970) move(&real, -*shift);
    return real;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec until = real_time(deadline);
    return real(condition, mutex, &until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec until = real_time(deadline);
    return real(semaphore, &until);
}

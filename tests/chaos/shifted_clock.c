/* Preloaded into a process: its time of day is off by as many seconds as the file CHAOS_CLOCKS/<pid> says at any moment.
   Time that only passes (CLOCK_MONOTONIC) is left alone, as on a machine whose clock is set. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none = 0;
static const volatile int64_t *seconds = &none;

__attribute__((constructor)) static void begin(void) {
  const char *folder = getenv("CHAOS_CLOCKS");
  char path[4096];
  if (folder == NULL) return;
  snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  fchmod(file, 0666); /* for the program that takes the place of this one under another account */
  if (ftruncate(file, sizeof none) == 0) {
    void *found = mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) seconds = found;
  }
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = (int)syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += *seconds;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *store) {
  struct timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  if (store != NULL) *store = precise.tv_sec;
  return precise.tv_sec;
}

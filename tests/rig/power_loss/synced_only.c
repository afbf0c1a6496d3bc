/* Preloaded into a process: whenever it syncs a file of the folder SYNCED_FROM, the file is copied to the folder SYNCED_TO;
   whenever it syncs the folder itself, files that it deleted are deleted there too. So SYNCED_TO has what a disk has after
   a loss of power, if it wrote nothing back by itself.

   If the file SYNCED_TO.lost exists, the power was lost: it names the process that was killed. Before another process opens
   a file of SYNCED_FROM, the folder gets what SYNCED_TO has, and nothing else. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int open_function(const char *, int, ...);

static int real_open(const char *path, int flags, mode_t mode) {
    return ((open_function *)dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}

static void delete_gone(const char *from, const char *to) {
    char path[PATH_MAX + NAME_MAX];
    struct stat found;
    DIR *folder = opendir(to);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(path, sizeof path, "%s/%s", from, entry->d_name);
        if (access(path, F_OK) == 0) continue;
        snprintf(path, sizeof path, "%s/%s", to, entry->d_name);
        if (stat(path, &found) == 0 && S_ISREG(found.st_mode)) unlink(path);
    }
    if (folder) closedir(folder);
}

/* The copy is whole or absent: a kill may come at any moment. */
static void copy_file(const char *from, const char *to) {
    char partial[PATH_MAX + NAME_MAX], block[1 << 16];
    int source = real_open(from, O_RDONLY, 0);
    if (source < 0) return;
    snprintf(partial, sizeof partial, "%s.partial", to);
    int target = real_open(partial, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t count;
    while (target >= 0 && (count = read(source, block, sizeof block)) > 0)
        if (write(target, block, count) != count) abort();
    close(source);
    if (target < 0 || close(target) != 0 || rename(partial, to) != 0) abort();
}

static int is_within(const char *path, const char *folder) {
    return strncmp(path, folder, strlen(folder)) == 0 && path[strlen(folder)] == '/';
}

static void copy_synced(int fd) {
    const char *from = getenv("SYNCED_FROM"), *to = getenv("SYNCED_TO");
    char link[64], path[PATH_MAX], copy[PATH_MAX + NAME_MAX];
    if (!from || !to) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (strcmp(path, from) == 0) delete_gone(from, to);
    if (!is_within(path, from)) return;
    snprintf(copy, sizeof copy, "%s/%s", to, strrchr(path, '/') + 1);
    copy_file(path, copy);
}

static void forget_unsynced(const char *path) {
    const char *from = getenv("SYNCED_FROM"), *to = getenv("SYNCED_TO");
    char lost[PATH_MAX], source[PATH_MAX + NAME_MAX], target[PATH_MAX + NAME_MAX];
    int victim = 0;
    if (!from || !to || !path || !is_within(path, from)) return;
    snprintf(lost, sizeof lost, "%s.lost", to);
    FILE *file = fopen(lost, "r");
    if (!file) return;
    int found = fscanf(file, "%d", &victim);
    fclose(file);
    if (found != 1 || victim == getpid()) return;
    DIR *folder = opendir(from);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        snprintf(target, sizeof target, "%s/%s", from, entry->d_name);
        unlink(target);
    }
    if (folder) closedir(folder);
    folder = opendir(to);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (entry->d_type != DT_REG || strstr(entry->d_name, ".partial")) continue;
        snprintf(source, sizeof source, "%s/%s", to, entry->d_name);
        snprintf(target, sizeof target, "%s/%s", from, entry->d_name);
        copy_file(source, target);
    }
    if (folder) closedir(folder);
    unlink(lost);
}

#define DEFINE_OPEN(NAME)                                               \
    int NAME(const char *path, int flags, ...) {                        \
        va_list more;                                                   \
        va_start(more, flags);                                          \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                   \
        forget_unsynced(path);                                          \
        return real_open(path, flags, mode);                            \
    }

DEFINE_OPEN(open)
DEFINE_OPEN(open64)

int fsync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    int result = real(fd);
    if (result == 0) copy_synced(fd);
    return result;
}

int fdatasync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    int result = real(fd);
    if (result == 0) copy_synced(fd);
    return result;
}

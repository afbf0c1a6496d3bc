/* Preloaded into a process: it keeps in the folder SYNCED_TO what a disk has of the folder SYNCED_FROM after a loss of
   power, if it wrote nothing back by itself.

   - A sync of a file keeps its content. A new name, also one by a rename, has the suffix `.unnamed` until its folder is
     synced; a new folder has a file of that name.
   - A sync of a folder keeps its names: what was deleted is deleted, and a file that was never synced is empty.

   If the file SYNCED_TO.lost exists, the power was lost: it names the process that was killed. Before another process opens
   a file of SYNCED_FROM, the folder gets what SYNCED_TO has, and nothing else; that works without subfolders only. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
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

typedef char path_t[PATH_MAX + NAME_MAX];

static const char UNNAMED[] = ".unnamed";

static int is_folder(const char *path) {
    struct stat found;
    return stat(path, &found) == 0 && S_ISDIR(found.st_mode);
}

static void create_empty(const char *path) {
    close(real_open(path, O_WRONLY | O_CREAT, 0600));
}

/* A folder of SYNCED_TO, and those above it. They have no names yet. */
static void make_folder(const char *path) {
    path_t above, mark;
    if (is_folder(path)) return;
    snprintf(above, sizeof above, "%s", path);
    *strrchr(above, '/') = 0;
    make_folder(above);
    if (mkdir(path, 0700) != 0) return;
    snprintf(mark, sizeof mark, "%s/%s", path, UNNAMED);
    create_empty(mark);
}

/* Where the content of a file of SYNCED_FROM is kept: under its name, or as yet without one. */
static int kept_at(const char *relative, int is_new, char *copy) {
    const char *to = getenv("SYNCED_TO");
    snprintf(copy, sizeof(path_t), "%s%s", to, relative);
    if (!is_new && access(copy, F_OK) == 0) return 1;
    strcat(copy, UNNAMED);
    return access(copy, F_OK) == 0;
}

static void name_file(const char *from, const char *to, const char *name) {
    path_t copy, unnamed, live;
    snprintf(live, sizeof live, "%s/%s", from, name);
    snprintf(copy, sizeof copy, "%s/%s", to, name);
    snprintf(unnamed, sizeof unnamed, "%s%s", copy, UNNAMED);
    if (is_folder(live)) {
        make_folder(copy);
        snprintf(unnamed, sizeof unnamed, "%s/%s", copy, UNNAMED);
        unlink(unnamed);
    } else if (rename(unnamed, copy) != 0 && access(copy, F_OK) != 0) {
        create_empty(copy);
    }
}

static void delete_if_gone(const char *from, const char *to, const char *name) {
    path_t live, copy;
    size_t length = strlen(name), suffix = strlen(UNNAMED);
    if (length >= suffix && strcmp(name + length - suffix, UNNAMED) == 0) return;
    snprintf(live, sizeof live, "%s/%s", from, name);
    snprintf(copy, sizeof copy, "%s/%s", to, name);
    if (access(live, F_OK) != 0 && !is_folder(copy)) unlink(copy);
}

static void keep_names(const char *from, const char *to) {
    make_folder(to);
    DIR *folder = opendir(from);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (entry->d_name[0] != '.') name_file(from, to, entry->d_name);
    if (folder) closedir(folder);
    folder = opendir(to);
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        if (entry->d_name[0] != '.') delete_if_gone(from, to, entry->d_name);
    if (folder) closedir(folder);
}

static pthread_mutex_t keeping = PTHREAD_MUTEX_INITIALIZER;

static void keep_path(path_t path, const char *from, const char *to) {
    path_t copy;
    if (is_folder(path)) {
        snprintf(copy, sizeof copy, "%s%s", to, path + strlen(from));
        keep_names(path, copy);
        return;
    }
    kept_at(path + strlen(from), 0, copy);
    char *name = strrchr(copy, '/');
    *name = 0;
    make_folder(copy);
    *name = '/';
    copy_file(path, copy);
}

static void keep_synced(int fd) {
    const char *from = getenv("SYNCED_FROM"), *to = getenv("SYNCED_TO");
    char link[64];
    path_t path;
    if (!from || !to) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (strcmp(path, from) != 0 && !is_within(path, from)) return;
    pthread_mutex_lock(&keeping);
    keep_path(path, from, to);
    pthread_mutex_unlock(&keeping);
}

/* The new name has the content, and the old one has it as well, until their folders are synced. Of a folder, the old
   name is gone. */
static void keep_renamed(const char *from, const char *to, const char *old, const char *new) {
    path_t source, target;
    if (is_folder(new)) {
        snprintf(source, sizeof source, "%s%s", to, old + strlen(from));
        snprintf(target, sizeof target, "%s%s", to, new + strlen(from));
        if (rename(source, target) != 0) return;
        strcat(strcat(target, "/"), UNNAMED);
        create_empty(target);
    } else if (kept_at(old + strlen(from), 0, source)) {
        kept_at(new + strlen(from), 1, target);
        unlink(target);
        if (link(source, target) != 0) abort();
    }
}

int rename(const char *old, const char *new) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    const char *from = getenv("SYNCED_FROM"), *to = getenv("SYNCED_TO");
    int result = real(old, new), error = errno;
    if (result == 0 && from && to && is_within(old, from) && is_within(new, from)) keep_renamed(from, to, old, new);
    errno = error;
    return result;
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
        if (entry->d_type != DT_REG || strstr(entry->d_name, ".partial") || strstr(entry->d_name, UNNAMED)) continue;
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
    if (result == 0) keep_synced(fd);
    return result;
}

int fdatasync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    int result = real(fd);
    if (result == 0) keep_synced(fd);
    return result;
}

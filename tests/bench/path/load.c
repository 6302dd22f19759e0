/* Makes load, as fast as the path lets it, and prints what became of it as one line of JSON.
 *
 *     load connect  ADDRESS PORT SECONDS PROCESSES FLIGHTS   connect, wait for the server's close, reset
 *     load request  ADDRESS PORT SECONDS PROCESSES FLIGHTS   send 64 bytes on a kept connection, read 64 back
 *     load datagram ADDRESS PORT SECONDS PROCESSES FLIGHTS   the same by UDP
 *     load flood    ADDRESS PORT DATAGRAMS SOURCES FLOWS     datagrams without an answer, for 0.4 seconds at most,
 *                                                            from FLOWS source ports on each of SOURCES
 *                                                            (addresses, comma between)
 *
 * The first three keep FLIGHTS going in each process; with one process and one flight each waits for the one
 * before, and times are those of an idle path. A flood goes through a raw socket, so that a new source port
 * costs the sender nothing; a veth carries each datagram to the far end before `send` returns.
 * Times are in microseconds: `connect` until the handshake is done, `answer` until the answer is there.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGE = 64, SHIFT = 7, STEPS = 1 << SHIFT, BUCKETS = 32 * STEPS, BATCH = 32 };
enum { PATIENCE_NS = 200000000, ENOUGH_NS = 400000000 };

struct histogram {
    uint64_t count[BUCKETS];
};
struct tally {
    uint64_t done, failed;
    struct histogram connect, answer;
    double seconds;
};
struct flight {
    int fd, connected;
    uint64_t began;
};

static struct sockaddr_in target;
static struct tally *tally;
static double cpu_before;
static int epoll;
static int kind;

static void give_up(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double cpu(int who) {
    struct rusage usage;
    getrusage(who, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* 128 buckets in each doubling, so a time is known to 1 %. */
static void note(struct histogram *histogram, uint64_t nanoseconds) {
    unsigned at;
    if (nanoseconds < STEPS) {
        at = (unsigned)nanoseconds;
    } else {
        unsigned shift = 63u - (unsigned)__builtin_clzll(nanoseconds) - SHIFT;
        at = (shift + 1) * STEPS + (unsigned)(nanoseconds >> shift) - STEPS;
    }
    histogram->count[at < BUCKETS ? at : BUCKETS - 1]++;
}

static double bucket_middle(unsigned at) {
    if (at < STEPS)
        return at;
    unsigned shift = at / STEPS - 1;
    return ((double)(at % STEPS + STEPS) + 0.5) * (double)(1ull << shift);
}

static double quantile(const struct histogram *all, double part) {
    uint64_t total = 0, seen = 0;
    for (unsigned at = 0; at < BUCKETS; at++)
        total += all->count[at];
    for (unsigned at = 0; at < BUCKETS; at++) {
        seen += all->count[at];
        if (total && (double)seen >= part * (double)total)
            return bucket_middle(at) / 1000.0;
    }
    return 0;
}

static void send_message(struct flight *flight) {
    static const char message[MESSAGE] = "a request of sixty-four bytes";
    flight->began = now();
    if (send(flight->fd, message, MESSAGE, MSG_NOSIGNAL) != MESSAGE)
        tally->failed++;
}

static void open_flight(struct flight *flight) {
    struct linger reset = {1, 0};
    int one = 1;
    flight->connected = 0;
    flight->fd = socket(AF_INET, kind | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (flight->fd < 0)
        give_up("socket");
    if (kind == SOCK_STREAM) {
        /* A reset leaves nobody in TIME_WAIT, where a port would be missing for a minute. */
        setsockopt(flight->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        setsockopt(flight->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    flight->began = now();
    if (connect(flight->fd, (struct sockaddr *)&target, sizeof target) < 0 && errno != EINPROGRESS)
        tally->failed++;
    struct epoll_event wanted = {EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, {.ptr = flight}};
    epoll_ctl(epoll, EPOLL_CTL_ADD, flight->fd, &wanted);
}

static int is_connected(struct flight *flight, uint32_t events) {
    if (flight->connected || !(events & EPOLLOUT))
        return flight->connected;
    flight->connected = 1;
    note(&tally->connect, now() - flight->began);
    return 1;
}

/* One connection from its beginning to the server's close; then the next. */
static void on_short(struct flight *flight, uint32_t events) {
    if (events & EPOLLERR) {
        tally->failed++;
    } else {
        is_connected(flight, events);
        if (!(events & (EPOLLIN | EPOLLRDHUP)))
            return;
        note(&tally->answer, now() - flight->began);
        tally->done++;
    }
    close(flight->fd);
    open_flight(flight);
}

static void on_kept(struct flight *flight, uint32_t events) {
    char answer[MESSAGE];
    int before = flight->connected;
    if (events & (EPOLLERR | EPOLLRDHUP)) {
        tally->failed++;
        close(flight->fd);
        open_flight(flight);
        return;
    }
    if (is_connected(flight, events) && !before)
        send_message(flight);
    if (events & EPOLLIN && recv(flight->fd, answer, MESSAGE, 0) == MESSAGE) {
        note(&tally->answer, now() - flight->began);
        tally->done++;
        send_message(flight);
    }
}

/* A datagram that got lost would end its flight. */
static void send_lost_again(struct flight *flights, int count) {
    uint64_t late = now() - PATIENCE_NS;
    for (int i = 0; i < count; i++) {
        if (flights[i].began < late) {
            tally->failed++;
            send_message(&flights[i]);
        }
    }
}

static void work(const char *mode, double seconds, int count) {
    struct epoll_event events[256];
    struct flight *flights = calloc((size_t)count, sizeof *flights);
    uint64_t began = now(), end = began + (uint64_t)(seconds * 1e9);
    int is_short = !strcmp(mode, "connect");
    epoll = epoll_create1(EPOLL_CLOEXEC);
    if (!flights || epoll < 0)
        give_up("epoll");
    for (int i = 0; i < count; i++)
        open_flight(&flights[i]);
    for (uint64_t next_look = began + PATIENCE_NS; now() < end;) {
        int ready = epoll_wait(epoll, events, 256, 100);
        for (int i = 0; i < ready; i++)
            (is_short ? on_short : on_kept)(events[i].data.ptr, events[i].events);
        if (kind == SOCK_DGRAM && now() > next_look) {
            send_lost_again(flights, count);
            next_look = now() + PATIENCE_NS;
        }
    }
    tally->seconds = (double)(now() - began) / 1e9;
    exit(0);
}

static void flood(long datagrams, char *sources, int flows) {
    struct __attribute__((packed)) {
        struct iphdr ip;
        struct udphdr udp;
        char data[MESSAGE];
    } packets[BATCH];
    struct iovec parts[BATCH];
    struct mmsghdr messages[BATCH];
    uint32_t addresses[16];
    int known = 0, raw = socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_RAW);
    for (char *word = strtok(sources, ","); word && known < 16; word = strtok(NULL, ","))
        addresses[known++] = inet_addr(word);
    if (raw < 0 || !known)
        give_up("raw socket");
    memset(packets, 0, sizeof packets);
    memset(messages, 0, sizeof messages);
    for (int i = 0; i < BATCH; i++) {
        packets[i].ip.version = 4;
        packets[i].ip.ihl = 5;
        packets[i].ip.ttl = 64;
        packets[i].ip.protocol = IPPROTO_UDP;
        packets[i].ip.daddr = target.sin_addr.s_addr;
        packets[i].udp.dest = target.sin_port;
        packets[i].udp.len = htons(sizeof packets[i].udp + MESSAGE);
        parts[i] = (struct iovec){&packets[i], sizeof packets[i]};
        messages[i].msg_hdr = (struct msghdr){
            .msg_name = &target, .msg_namelen = sizeof target, .msg_iov = &parts[i], .msg_iovlen = 1};
    }
    cpu_before = cpu(RUSAGE_SELF);
    uint64_t began = now();
    for (long sent = 0; sent < datagrams && now() - began < ENOUGH_NS; sent += BATCH) {
        for (int i = 0; i < BATCH; i++) {
            long flow = (sent + i) % ((long)flows * known);
            packets[i].ip.saddr = addresses[flow % known];
            packets[i].udp.source = htons((uint16_t)(2000 + flow / known));
        }
        int gone = sendmmsg(raw, messages, BATCH, 0);
        tally->done += gone > 0 ? (uint64_t)gone : 0;
        tally->failed += gone < BATCH ? (uint64_t)(BATCH - (gone > 0 ? gone : 0)) : 0;
    }
    tally->seconds = (double)(now() - began) / 1e9;
}

static void report(int processes) {
    static struct tally all;
    for (int p = 0; p < processes; p++) {
        all.done += tally[p].done;
        all.failed += tally[p].failed;
        if (tally[p].seconds > all.seconds)
            all.seconds = tally[p].seconds;
        for (unsigned at = 0; at < BUCKETS; at++) {
            all.connect.count[at] += tally[p].connect.count[at];
            all.answer.count[at] += tally[p].answer.count[at];
        }
    }
    double spent = cpu(RUSAGE_SELF) + cpu(RUSAGE_CHILDREN) - cpu_before;
    printf("{\"done\": %llu, \"failed\": %llu, \"seconds\": %.6f, \"cpu\": %.6f, ", (unsigned long long)all.done,
           (unsigned long long)all.failed, all.seconds, spent);
    printf("\"answer_p50\": %.2f}\n", quantile(&all.answer, 0.5));
}

int main(int argc, char **argv) {
    if (argc != 7) {
        fprintf(stderr, "usage: load connect|request|datagram ADDRESS PORT SECONDS PROCESSES FLIGHTS\n"
                        "       load flood ADDRESS PORT DATAGRAMS SOURCES FLOWS\n");
        return 2;
    }
    int flooding = !strcmp(argv[1], "flood"), processes = flooding ? 1 : atoi(argv[5]);
    kind = strcmp(argv[1], "datagram") ? SOCK_STREAM : SOCK_DGRAM;
    target = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[3])), .sin_addr.s_addr = inet_addr(argv[2])};
    size_t size = sizeof *tally * (size_t)processes;
    tally = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (tally == MAP_FAILED)
        give_up("mmap");
    if (flooding)
        flood(atol(argv[4]), argv[5], atoi(argv[6]));
    for (int p = 0; !flooding && p < processes; p++) {
        if (fork() == 0) {
            tally += p;
            work(argv[1], atof(argv[4]), atoi(argv[6]));
        }
    }
    while (wait(NULL) > 0)
        ;
    report(processes);
    return 0;
}

/* What the load meets: as little work as a server can do.
 *
 *     serve PROCESSES CLOSING ECHO UDP_ECHO UDP_SINK       four ports, each on every address
 *
 * CLOSING accepts a connection and closes it, ECHO sends back what it reads on kept connections, UDP_ECHO sends
 * datagrams back from the address they came to, UDP_SINK is bound and never read, so that datagrams end there at
 * the least cost. Prints READY once all are bound, and ends when its standard input closes.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BACKLOG = 4096, CLOSING = 0, ECHO = 1, UDP_ECHO = 2, UDP_SINK = 3, KEPT = 4 };

static void give_up(const char *what) {
    perror(what);
    exit(1);
}

static int bound(int kind, int port, int room) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1, fd = socket(AF_INET, kind | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        give_up("socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (kind == SOCK_DGRAM) {
        setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &room, sizeof room);
    }
    if (bind(fd, (struct sockaddr *)&here, sizeof here) < 0)
        give_up("bind");
    if (kind == SOCK_STREAM && listen(fd, BACKLOG) < 0)
        give_up("listen");
    return fd;
}

/* The number of the role stands in the upper half, the descriptor in the lower. */
static void watch(int epoll, int fd, int role) {
    struct epoll_event wanted = {EPOLLIN, {.u64 = (uint64_t)role << 32 | (uint32_t)fd}};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &wanted) < 0)
        give_up("epoll_ctl");
}

static void accept_all(int epoll, int listener, int role) {
    int one = 1, fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (role == CLOSING) {
            close(fd);
        } else {
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            watch(epoll, fd, KEPT);
        }
    }
}

static void answer_kept(int fd) {
    char data[4096];
    ssize_t length = recv(fd, data, sizeof data, 0);
    if (length <= 0 || send(fd, data, (size_t)length, MSG_NOSIGNAL) != length)
        close(fd);
}

static void answer_datagrams(int fd) {
    char data[2048], control[CMSG_SPACE(sizeof(struct in_pktinfo))];
    struct sockaddr_in peer;
    for (;;) {
        struct iovec part = {data, sizeof data};
        struct msghdr message = {.msg_name = &peer, .msg_namelen = sizeof peer, .msg_iov = &part, .msg_iovlen = 1,
                                 .msg_control = control, .msg_controllen = sizeof control};
        ssize_t length = recvmsg(fd, &message, 0);
        if (length < 0)
            return;
        struct cmsghdr *said = CMSG_FIRSTHDR(&message);
        if (said) { /* answer from the address that was asked */
            struct in_pktinfo *to = (struct in_pktinfo *)CMSG_DATA(said);
            to->ipi_spec_dst = to->ipi_addr;
            to->ipi_ifindex = 0;
        }
        part.iov_len = (size_t)length;
        sendmsg(fd, &message, MSG_NOSIGNAL);
    }
}

static void serve(const int *ports, int ready) {
    struct epoll_event events[256];
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    watch(epoll, bound(SOCK_STREAM, ports[CLOSING], 0), CLOSING);
    watch(epoll, bound(SOCK_STREAM, ports[ECHO], 0), ECHO);
    watch(epoll, bound(SOCK_DGRAM, ports[UDP_ECHO], 1 << 20), UDP_ECHO);
    if (write(ready, "", 1) != 1)
        give_up("pipe");
    for (;;) {
        int count = epoll_wait(epoll, events, 256, -1);
        for (int i = 0; i < count; i++) {
            int fd = (int)(uint32_t)events[i].data.u64, role = (int)(events[i].data.u64 >> 32);
            if (role == KEPT)
                answer_kept(fd);
            else if (role == UDP_ECHO)
                answer_datagrams(fd);
            else
                accept_all(epoll, fd, role);
        }
    }
}

int main(int argc, char **argv) {
    int ports[4], ready[2];
    char ignored;
    if (argc != 6) {
        fprintf(stderr, "usage: serve PROCESSES CLOSING ECHO UDP_ECHO UDP_SINK\n");
        return 2;
    }
    for (int i = 0; i < 4; i++)
        ports[i] = atoi(argv[2 + i]);
    if (pipe(ready) < 0)
        give_up("pipe");
    bound(SOCK_DGRAM, ports[UDP_SINK], 1);
    for (int p = 0; p < atoi(argv[1]); p++)
        if (fork() == 0)
            serve(ports, ready[1]);
    for (int p = 0; p < atoi(argv[1]); p++)
        if (read(ready[0], &ignored, 1) != 1)
            give_up("a process that serves");
    printf("READY\n");
    fflush(stdout);
    while (read(0, &ignored, 1) > 0)
        ; /* the others end with this one */
    return 0;
}

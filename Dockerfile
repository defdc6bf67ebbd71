# Two images of one static binary: the server's, on an empty base (the default), and the CSI node plugin's, which has the
# file-system tools beside it. The server keeps its state where --data and --disk point: mount both.
#
#   docker build --build-arg VERSION=$(git describe --tags --always) -t gabion .
#   docker run --network host -v /var/lib/gabion:/data -v /mnt/disk1:/disks/1 gabion \
#     server --node n1 --rack r1 --data /data --disk /disks/1 --listen 127.0.0.1 --bootstrap
#
# The server runs as user 65532, who must own both directories.
#
#   docker build --target node -t gabion-node .
#
# docs/host-requirements.md says what the node plugin's container needs of its host.

FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
ENV CGO_ENABLED=0
RUN go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /gabion ./cmd/gabion

# blkid, mount, mkfs, fsck and the tools that grow file systems; nothing else is ever executed.
FROM debian:bookworm-slim AS node
RUN apt-get update \
	&& apt-get install -y --no-install-recommends e2fsprogs xfsprogs util-linux mount kmod \
	&& rm -rf /var/lib/apt/lists/*
COPY --from=build /gabion /usr/local/bin/gabion
ENTRYPOINT ["gabion", "csi", "--mode", "node"]

FROM scratch AS server
COPY --from=build /gabion /gabion
USER 65532:65532
# metadata, raft, replicas, NBD, metrics
EXPOSE 7400 7401 7402 10809 7480
ENTRYPOINT ["/gabion"]

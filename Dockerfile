# One static binary on an empty base. The server keeps its state where --data and --disk point: mount both.
#
#   docker build --build-arg VERSION=$(git describe --tags --always) -t gabion .
#   docker run --network host -v /var/lib/gabion:/data -v /mnt/disk1:/disks/1 gabion \
#     server --node n1 --rack r1 --data /data --disk /disks/1 --listen 127.0.0.1 --bootstrap
#
# The process runs as user 65532, who must own both directories.

FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=unknown
ENV CGO_ENABLED=0
RUN go build -trimpath -buildvcs=false -ldflags "-s -w -X main.version=${VERSION}" -o /gabion ./cmd/gabion

FROM scratch
COPY --from=build /gabion /gabion
USER 65532:65532
# metadata, raft, replicas, NBD, metrics
EXPOSE 7400 7401 7402 10809 7480
ENTRYPOINT ["/gabion"]

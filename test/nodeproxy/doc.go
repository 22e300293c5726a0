// SPDX-License-Identifier: Apache-2.0

// Package nodeproxy tests the program kpng as a replacement for kube-proxy, with only the
// capabilities that its DaemonSets grant. Network namespaces stand for the node, its pods
// and a client. The tests use real packets and need root. All except those of
// replace_test.go use a real API server.
//
// TestBackendsReplaceEachOther includes the backend ipvs only if the kernel has IPVS, and
// TestMoveFromIPVSWithoutDrainBreaksConnections needs such a kernel. The program kernel
// runs both tests on such a kernel. There, compiling kpng would be slow, so the flag
// -kpng names a compiled kpng:
//
//	CGO_ENABLED=0 go build -C test -o /tmp/kernel ./kernel
//	CGO_ENABLED=0 go build -o /tmp/kpng ./cmd/kpng
//	cd test && go test -exec /tmp/kernel ./nodeproxy -run 'Replace|MoveFrom' -kpng /tmp/kpng
package nodeproxy

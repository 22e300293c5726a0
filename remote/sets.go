// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"github.com/kpng-project/kpng/api/localv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// setsServer serves views of nodes.
type setsServer struct {
	localv1.UnimplementedSetsServer
	*Server
}

// Watch implements localv1.SetsServer.
func (s setsServer) Watch(stream grpc.BidiStreamingServer[localv1.WatchReq, localv1.OpItem]) error {
	return converse(s.Server, stream, func(c caller, req *localv1.WatchReq) (listener[localv1.WatchReq], error) {
		if err := s.mayWatch(c, req.GetNodeName()); err != nil {
			return nil, err
		}
		return s.newWatch(stream, c, req), nil
	})
}

// nodeCertificate is what the common name of a node's certificate begins with.
const nodeCertificate = "system:node:"

func (s *Server) mayWatch(c caller, node string) error {
	if !s.opts.NodeCertificates || c.cert != nil && node != "" && c.cert.Subject.CommonName == nodeCertificate+node {
		return nil
	}
	return status.Errorf(codes.PermissionDenied, "%s may not watch node %q", c.name, node)
}

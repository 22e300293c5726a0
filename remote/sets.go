// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"errors"
	"io"

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
	c, err := callerOf(stream.Context())
	if err != nil {
		return err
	}
	done, err := s.peers.admit(c)
	if err != nil {
		return err
	}
	defer done()
	req, err := stream.Recv()
	if err != nil {
		return endOf(err)
	}
	if err := s.mayWatch(c, req.GetNodeName()); err != nil {
		return err
	}
	w := s.newWatch(stream, c, req)
	defer w.cursor.Close()
	for {
		if err := w.answer(stream.Context()); err != nil {
			return err
		}
		req, err := stream.Recv()
		if err != nil {
			return endOf(err)
		}
		if name := req.GetNodeName(); name != "" && name != w.name {
			return status.Errorf(codes.InvalidArgument, "this stream is for node %q, open another one for node %q", w.name, name)
		}
	}
}

// endOf is how a stream ends whose client is heard no more.
func endOf(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// nodeCertificate is what the common name of a node's certificate begins with.
const nodeCertificate = "system:node:"

func (s *Server) mayWatch(c caller, node string) error {
	if !s.opts.NodeCertificates || c.cert != nil && node != "" && c.cert.Subject.CommonName == nodeCertificate+node {
		return nil
	}
	return status.Errorf(codes.PermissionDenied, "%s may not watch node %q", c.name, node)
}

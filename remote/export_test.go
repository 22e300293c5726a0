// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"github.com/kpng-project/kpng/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// BareGRPC returns a gRPC server with the gRPC options of s and no services.
func (s *Server) BareGRPC() *grpc.Server {
	return grpc.NewServer(s.grpcOptions(insecure.NewCredentials())...)
}

// TokenFor returns the token of a client of the node that requested all endpoints and has
// the current state.
func (s *Server) TokenFor(node *api.Node) []byte {
	w := &watch{name: node.Name, who: complete}
	return s.newToken(s.state.Snapshot().Revision, w.depends(node)...)
}

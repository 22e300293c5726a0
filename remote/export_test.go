// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"github.com/kpng-project/kpng/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// BareGRPC returns a server that is set up as this one, and serves nothing.
func (s *Server) BareGRPC() *grpc.Server {
	return grpc.NewServer(s.grpcOptions(insecure.NewCredentials())...)
}

// TokenFor returns the token that a client of the node has which has asked for all
// endpoints and was told the state as it is.
func (s *Server) TokenFor(node *api.Node) []byte {
	w := &watch{name: node.Name, who: complete}
	return s.newToken(s.state.Snapshot().Revision, w.depends(node)...)
}

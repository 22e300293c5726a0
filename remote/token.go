// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"bytes"
	"encoding/binary"

	"github.com/kpng-project/kpng/diffstore"
)

// A token says where a client was: which server told it, up to which revision, and
// of what else the views depend that it was told. It is the server's alone to
// read; a client hands it back.

// newToken returns the token for a revision. What follows are strings on which the
// told depends, such as the node and its zone.
func (s *Server) newToken(revision diffstore.Revision, depends ...string) []byte {
	b := append(make([]byte, 0, 128), s.instance...)
	b = binary.AppendUvarint(b, uint64(revision))
	for _, d := range depends {
		b = append(binary.AppendUvarint(b, uint64(len(d))), d...)
	}
	return b
}

// readToken returns the revision of a token, 0 if it is of another server or depends on
// something else.
func (s *Server) readToken(token []byte, depends ...string) diffstore.Revision {
	rest, _ := bytes.CutPrefix(token, s.instance)
	revision, _ := binary.Uvarint(rest)
	if !bytes.Equal(token, s.newToken(diffstore.Revision(revision), depends...)) {
		return 0
	}
	return diffstore.Revision(revision)
}

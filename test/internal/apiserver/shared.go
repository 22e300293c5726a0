// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
)

// Shared is one server for all tests of a package. The zero value is ready to use. See
// the package comment.
type Shared struct {
	// Options are the server's options.
	Options Options

	mu     sync.Mutex
	server *Server
}

// Run runs the tests, stops the server if it was started, and returns the exit code.
func (s *Shared) Run(m *testing.M) int {
	code := m.Run()
	if err := s.stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// Get returns the server. The first call starts the server. If the API server or etcd was
// not running at the end of a test, the next call starts a new server. In all other cases
// the server still has the objects of earlier tests.
func (s *Shared) Get(t testing.TB) *Server {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server == nil {
		// The server runs longer than this test, so its context must not end with the test.
		server, err := start(context.WithoutCancel(t.Context()), s.Options)
		if err != nil {
			t.Fatal(err)
		}
		s.server = server
	}
	server := s.server
	t.Cleanup(func() {
		if server.APIServer.Running() && server.Etcd.Running() {
			return
		}
		if err := s.stop(); err != nil {
			t.Error(err)
		}
	})
	server.showLogsOnFailure(t)
	return server
}

func (s *Shared) stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server == nil {
		return nil
	}
	err := s.server.close()
	s.server = nil
	return err
}

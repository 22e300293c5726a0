// SPDX-License-Identifier: Apache-2.0

package remote

import (
	"context"
	"io/fs"
	"net"
	"time"

	"github.com/kpng-project/kpng/internal/transport"
)

// DefaultAddress is the default address of servers and clients: tcp://127.0.0.1:12090.
const DefaultAddress = transport.DefaultAddress

// DialOptions configure the connection to a server. When all addresses have failed, the
// client waits for a random time of up to 500 ms before it tries them again. This limit
// doubles, up to 15 s, each time all addresses have failed again. It also doubles when a
// server answers and closes the connection in less than 15 s.
//
// Plaintext is allowed on loopback addresses and unix sockets. On other addresses,
// plaintext is an error unless Insecure allows it.
type DialOptions struct {
	// Addresses are the addresses of one or more servers, in the form tcp://host:port,
	// host:port or unix:///path. A client tries them in a random order, so that clients
	// spread over servers. It tries the next address when the connection fails, when the
	// server does not answer, or when the server is stale and another server may have newer
	// state. Default: DefaultAddress if Discover is nil, else none.
	Addresses []string
	// Discover returns the addresses of further servers, in the same form. The client calls
	// it at the start, and when all addresses have failed. The client also calls it before
	// it reconnects, if the last call was more than 10 minutes ago. If Discover returns an
	// error or no address, the client keeps the addresses that it knows. A call may take 10
	// s. Default: none.
	Discover func(context.Context) ([]string, error)
	// If TLS is not nil, all connections use it.
	TLS *TLS
	// Insecure allows plaintext connections to other machines, and to unix sockets of
	// other users. Without Insecure and without TLS, the process that listens on a unix
	// socket must run as root or as the user of this process. Only Linux reports that
	// user.
	Insecure bool
	// With FailFast, the client ends with an error after each address has failed once, or
	// if a connection fails after a good answer. FailFast is for programs that run once.
	FailFast bool

	minBackoff, maxBackoff time.Duration // for tests; the defaults are in package transport
}

func (o *DialOptions) dialer() (*transport.Dialer, error) {
	return transport.NewDialer(transport.DialOptions{
		Addresses: o.Addresses, Discover: o.Discover, TLS: (*transport.TLS)(o.TLS), Insecure: o.Insecure,
		MinBackoff: o.minBackoff, MaxBackoff: o.maxBackoff, FailFast: o.FailFast,
	})
}

// TLS names the PEM files for mutual TLS, in which both ends present certificates.
// Changed files are read before the next connection, so certificates can be renewed at
// any time. If changed files are invalid, the old certificates stay in use.
type TLS struct {
	// CAFile contains the authorities that may sign the certificate of the other end.
	CAFile string
	// CertFile contains the certificate of this end, with its chain if needed.
	CertFile string
	// KeyFile contains the key of the certificate in CertFile.
	KeyFile string
	// For a client, ServerName is the name that the server's certificate must contain.
	// Default: the host of the server's address.
	ServerName string
}

// Listen listens on an address of the form tcp://host:port, host:port or unix:///path.
// For a unix socket, mode is the file mode of the socket. 0 means 0600: then only the
// server's user can connect.
//
// Listen creates the directory of a unix socket, but not the parent of that directory. It
// replaces a socket without a listening process. For any other existing file, it returns
// an error. The new socket gets its mode before a client can connect. Closing the
// listener removes the socket, unless another socket has replaced it.
func Listen(address string, mode fs.FileMode) (net.Listener, error) {
	a, err := transport.ParseAddress(address)
	if err != nil {
		return nil, err
	}
	return a.Listen(mode)
}

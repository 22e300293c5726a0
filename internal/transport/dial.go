// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"k8s.io/klog/v2"
)

// DialOptions configure the connection to a server. Package remote has the same options and
// describes them.
type DialOptions struct {
	Addresses              []string
	Discover               func(context.Context) ([]string, error)
	TLS                    *TLS
	Insecure               bool
	MinBackoff, MaxBackoff time.Duration
	FailFast               bool
}

// Dialer connects to a server, and connects again when the connection fails.
type Dialer struct {
	opts      DialOptions
	addresses []Address
}

// NewDialer returns a dialer. It does not connect.
func NewDialer(opts DialOptions) (*Dialer, error) {
	if len(opts.Addresses) == 0 && opts.Discover == nil {
		opts.Addresses = []string{DefaultAddress}
	}
	if opts.MinBackoff <= 0 {
		opts.MinBackoff = 500 * time.Millisecond
	}
	if opts.MaxBackoff <= 0 {
		opts.MaxBackoff = 15 * time.Second
	}
	d := &Dialer{opts: opts}
	for _, s := range opts.Addresses {
		a, err := d.parse(s)
		if err != nil {
			return nil, err
		}
		d.addresses = append(d.addresses, a)
	}
	return d, nil
}

// parse parses an address, and returns an error if a connection to it would be insecure.
func (d *Dialer) parse(s string) (Address, error) {
	a, err := ParseAddress(s)
	if err != nil || d.opts.TLS != nil || d.opts.Insecure {
		return a, err
	}
	if err := a.checkPlaintext(); err != nil {
		return a, fmt.Errorf("%w (flags --api-tls-ca-file, --api-tls-cert-file and --api-tls-key-file, or --api-insecure)", err)
	}
	return a, nil
}

// firstMessage is the time limit for each message of a server's first answer. If a server
// has not yet read the cluster's state, it sends nothing and exceeds this limit.
const firstMessage = 15 * time.Second

var (
	errSilent = fmt.Errorf("the server sent nothing for %v; it may not have read its cluster yet", firstMessage)
	errStale  = errors.New("the server's state is stale; another address may have newer state")
)

// Stay connects to a server and calls the function useConn with the connection. Whenever
// useConn returns, Stay connects again and calls useConn again. When ctx ends, Stay
// returns the cause of ctx.
//
// The function useConn must call its argument heard after each message. The argument
// complete of heard says whether the message ends an answer, and the argument stale says
// whether the server has lost its own source. If heard returns an error, useConn has to
// drop the answer and return that error. Stay resets the backoff when a connection with a
// complete answer has lasted for MaxBackoff. So a server that answers and then closes the
// connection causes few connections.
//
// If a server's first answer takes too long, Stay tries the next address. With a single
// address and without FailFast, Stay waits without a time limit. If a server is stale,
// Stay tries the next address, unless all other servers have failed or were stale too.
func (d *Dialer) Stay(ctx context.Context, useConn func(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error) error {
	log := klog.FromContext(ctx)
	var files *certFiles
	if d.opts.TLS != nil {
		files = &certFiles{TLS: *d.opts.TLS, log: log}
		if _, _, err := files.load(); err != nil {
			return err
		}
	}
	l := d.newList()
	failures := 0 // failed visits in a row; the end of a good visit counts as a failed visit
	rounds := 0   // rounds in a row in which all visits failed or were short
	for {
		listErr := l.refresh(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n := len(l.addresses)
		if listErr != nil {
			if n == 0 && d.opts.FailFast {
				return listErr
			}
			log.Error(listErr, "Cannot read the whole list of servers", "known", n)
		}
		if n == 0 {
			rounds++
			if err := pause(ctx, d.backoff(rounds)); err != nil {
				return err
			}
			continue
		}
		address, began := l.take(), time.Now()
		v := &visit{patience: firstMessage, others: n - 1, untried: n - 1 - failures}
		if n == 1 && d.opts.Discover == nil && !d.opts.FailFast {
			v.patience = math.MaxInt64 // wait without a limit: there is no other address
		}
		err := d.visit(klog.NewContext(ctx, log.WithValues("server", address.String())), address, files, v, useConn)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if v.good {
			failures = 0
		}
		failures++
		if d.opts.FailFast && (v.good || failures >= n) {
			return fmt.Errorf("server %s: %w", address, err)
		}
		wait := time.Duration(0)
		if v.good && time.Since(began) >= d.opts.MaxBackoff {
			rounds = 0
			wait = d.backoff(rounds)
		} else if v.good || failures%n == 0 {
			rounds++
			wait = d.backoff(rounds)
			l.outdated = true
		}
		if v.good {
			log.Info("Lost connection to server; reconnecting", "server", address.String(), "cause", err, "wait", wait)
		} else {
			log.Error(err, "Cannot use server; retrying", "server", address.String(), "failures", failures, "wait", wait)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

// pause waits for the given time. If ctx ends earlier, pause returns the cause.
func pause(ctx context.Context, wait time.Duration) error {
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// visit connects to a server and calls useConn. It returns why the visit has ended.
func (d *Dialer) visit(ctx context.Context, address Address, files *certFiles, v *visit, useConn func(ctx context.Context, conn *grpc.ClientConn, heard func(complete, stale bool) error) error) error {
	running, end := context.WithCancelCause(ctx)
	defer end(nil)
	v.silent = time.AfterFunc(v.patience, func() { end(errSilent) })
	defer v.silent.Stop()
	err := d.connect(ctx, address, files, func(conn *grpc.ClientConn) error { return useConn(running, conn, v.heard) })
	if running.Err() != nil {
		return context.Cause(running)
	}
	return err
}

// visit is one call of useConn.
type visit struct {
	patience time.Duration
	silent   *time.Timer // ends the visit to a silent server
	others   int         // number of other addresses
	untried  int         // number of other addresses that may be good
	good     bool
}

func (v *visit) heard(complete, stale bool) error {
	switch {
	case complete && stale && v.untried > 0:
		return errStale
	case complete:
		v.good = true
		v.silent.Stop()
		if !stale {
			v.untried = v.others
		}
	case !v.good:
		v.silent.Reset(v.patience)
	}
	return nil
}

// backoff returns the random time to wait after the given number of failed rounds.
func (d *Dialer) backoff(round int) time.Duration {
	most := d.opts.MinBackoff
	for ; round > 1 && most < d.opts.MaxBackoff; round-- {
		most *= 2
	}
	return rand.N(min(most, d.opts.MaxBackoff)) + 1
}

func (d *Dialer) connect(ctx context.Context, a Address, files *certFiles, use func(*grpc.ClientConn) error) error {
	creds, err := d.credentials(a, files)
	if err != nil {
		return err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			dialer := net.Dialer{Timeout: 5 * time.Second}
			conn, err := dialer.DialContext(ctx, a.network, a.name)
			if err != nil || a.network != "unix" || files != nil || d.opts.Insecure {
				return conn, err
			}
			if err := checkServer(conn); err != nil {
				conn.Close()
				return nil, fmt.Errorf("%s: %w", a, err)
			}
			return conn, nil
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithStaticStreamWindowSize(answerWindow),
		grpc.WithStaticConnWindowSize(answerWindow),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
	}
	if files == nil {
		options = append(options, grpc.WithAuthority("localhost"))
	}
	conn, err := grpc.NewClient("passthrough:///"+a.name, options...)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := use(conn); err != nil {
		return err
	}
	return errors.New("server ended the stream")
}

// answerWindow is the flow-control window for a server's messages. The window is fixed.
// Otherwise gRPC would send a ping with each answer to measure the bandwidth. With
// thousands of clients, the pings cost more than the answers. The fixed window allows 100
// MB/s at a latency of 10 ms.
const answerWindow = 1 << 20

// maxMessage is the maximum size of a message that a client accepts. Servers send at most
// about 2 MB.
const maxMessage = 16 << 20

func (d *Dialer) credentials(a Address, files *certFiles) (credentials.TransportCredentials, error) {
	if files == nil {
		return insecure.NewCredentials(), nil
	}
	cert, pool, err := files.load()
	if err != nil {
		return nil, err
	}
	name := files.ServerName
	if name == "" {
		name = a.host()
	}
	if name == "" {
		name = "localhost" // a unix socket has no host name
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion:   tls.VersionTLS13,
		ServerName:   name,
		RootCAs:      pool,
		Certificates: []tls.Certificate{*cert},
	}), nil
}
